"""Which storages cross the boundaries of a chain, which layer makes each of them, and whether any layer keeps it.

A storage may cross several boundaries (views, in-place layers, skip connections) and is kept if any layer that it
crosses keeps it; it is counted once, at the layer that made it. That is what findings on real allocators showed to be
exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.core.values.profile import BoundaryTensor, LayerProfile, MemoryDetail


class Relay(NamedTuple):
    """A tensor that passes by some layers, one after the other, which hand its gradient on as it is."""

    origin: int
    place: int
    first: int
    last: int


class Crossing(NamedTuple):
    """A storage that crosses boundaries."""

    until: int
    bytes: tuple[float, float, float]
    """Kept by a layer that gets it, kept by its maker alone, kept by nobody: one of them is its size."""


def additive_crossing(layers: Sequence[LayerProfile], n: int) -> dict[tuple[int, int], Crossing]:
    """The storages that cross boundaries, as far as the required fields tell: one output for each layer."""
    outputs = {}
    for index, layer in enumerate(layers):
        output, saved = float(layer.output_bytes[n]), float(layer.saved_bytes[n])
        outputs[index, 0] = Crossing(index + 1, (min(output, saved), 0.0, max(0.0, output - saved)))
    return outputs


class CrossingStorages:
    """Which storage every boundary tensor lies in, where it was made, and whether any layer keeps it."""

    def __init__(self, details: Sequence[MemoryDetail]) -> None:
        self.details = details
        self.bytes: list[int] = []
        self.origin: list[int] = []
        self.place: list[int] = []
        self.until: list[int] = []
        self.kept: list[bool] = []
        self.kept_by_reader: list[bool] = []
        self.relaying: dict[int, dict[int, int]] = {}
        """By storage, the layers that a tensor in it passes by, with the bytes of its gradient."""
        self.behind: list[set[int]] = []
        self.received: list[list[int]] = []
        crossing = [self._new(-1, place, tensor) for place, tensor in enumerate(details[0].inputs)]
        for layer, detail in enumerate(details):
            for storage in crossing:
                self.until[storage] = layer
            for storage, tensor in zip(crossing, detail.inputs, strict=False):
                self.kept[storage] |= tensor.kept
                self.kept_by_reader[storage] |= tensor.kept
            received, crossing = crossing, []
            self.received.append(received)
            for tensor in detail.outputs:
                crossing.append(self._output(layer, tensor, received, crossing))
            self.behind.append(set(crossing))
        for storage in crossing:
            self.until[storage] = len(details)

    def _new(self, origin: int, place: int, tensor: BoundaryTensor) -> int:
        self.bytes.append(tensor.bytes)
        self.origin.append(origin)
        self.place.append(place)
        self.until.append(origin)
        self.kept.append(tensor.kept)
        self.kept_by_reader.append(False)
        return len(self.bytes) - 1

    def _output(self, layer: int, tensor: BoundaryTensor, received: list[int], before: list[int]) -> int:
        crossing = [*received, *before]
        if 0 <= tensor.alias < len(crossing):
            storage = crossing[tensor.alias]
            self.kept[storage] |= tensor.kept
            self.kept_by_reader[storage] |= tensor.kept and self.origin[storage] < layer
            if tensor.relayed and tensor.carries:
                # Of a view its gradient is as large as the tensor, not as the storage.
                given = self.details[layer].inputs
                size = given[tensor.alias].bytes if tensor.alias < len(given) else self.bytes[storage]
                self.relaying.setdefault(storage, {}).setdefault(layer, size)
            return storage
        return self._new(layer, len(before), tensor)

    def saved(self) -> list[float]:
        """Bytes that each layer adds to what is held for backward."""
        saved = [float(detail.internal_bytes) for detail in self.details]
        for size, origin, kept in zip(self.bytes, self.origin, self.kept, strict=True):
            if kept and origin >= 0:
                saved[origin] += size
        return saved

    def crossing(self) -> dict[tuple[int, int], Crossing]:
        """Every storage, by its origin and its place among what that layer makes."""
        crossing = {}
        for n, size in enumerate(self.bytes):
            own = float(size)
            by = (own, 0.0, 0.0) if self.kept_by_reader[n] else (0.0, own, 0.0) if self.kept[n] else (0.0, 0.0, own)
            crossing[self.origin[n], self.place[n]] = Crossing(self.until[n], by)
        return crossing

    def relays(self) -> dict[Relay, int]:
        """The tensors that pass by, with the bytes of their gradients; layers one after the other are one relay."""
        relays = {}
        for n, sizes in self.relaying.items():
            begins = [layer for layer in sizes if layer - 1 not in sizes]
            ends = [layer for layer in sizes if layer + 1 not in sizes]
            for first, last in zip(begins, ends, strict=True):
                relays[Relay(self.origin[n], self.place[n], first, last)] = min(sizes[first], self.bytes[n])
        return relays

    def passing(self) -> list[int]:
        """Bytes behind each layer that a layer in front of it made."""
        return [sum([self.bytes[s] for s in behind if self.origin[s] < n]) for n, behind in enumerate(self.behind)]

    def bytes_behind(self) -> list[int]:
        """Bytes behind each layer, a storage that several tensors lie in once."""
        return [sum([self.bytes[storage] for storage in behind]) for behind in self.behind]

    def unkept_behind(self) -> list[int]:
        """Bytes behind each layer that no layer keeps."""
        return [sum([self.bytes[s] for s in behind if not self.kept[s]]) for behind in self.behind]


def writes_received(details: Sequence[MemoryDetail]) -> list[bool]:
    """Whether a stage that begins at each layer writes into what it receives, at once or through views of it."""
    writes = [False]
    for detail in reversed(details):
        writes.append(detail.writes_input or (writes[-1] and any(tensor.alias >= 0 for tensor in detail.outputs)))
    return writes[:0:-1]
