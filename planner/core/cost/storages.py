"""Storages that cross the boundaries of a chain, the layers that make them, and the layers that save them.

A storage may cross several boundaries (views, in-place layers, skip connections). It is saved if any layer saves a
tensor in it. It counts once, at the layer that made it. Comparisons with real allocators show that this rule is exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.core.values.profile import BoundaryTensor, LayerProfile, MemoryDetail


class Relay(NamedTuple):
    """Tensor that consecutive layers pass on unchanged, so that its gradient is also passed back unchanged."""

    origin: int
    place: int
    first: int
    last: int


class Crossing(NamedTuple):
    """Storage that crosses boundaries."""

    until: int
    bytes: tuple[float, float, float]
    """Bytes of the storage, in one of three entries; the other two entries are 0.

    The first entry is used if a receiving layer saves the storage, the second if only the layer that makes it does,
    and the third if no layer saves it.
    """


def additive_crossing(layers: Sequence[LayerProfile], n: int) -> dict[tuple[int, int], Crossing]:
    """Return the storages that cross boundaries if a profile has only the required fields: one output per layer."""
    outputs = {}
    for index, layer in enumerate(layers):
        output, saved = float(layer.output_bytes[n]), float(layer.saved_bytes[n])
        outputs[index, 0] = Crossing(index + 1, (min(output, saved), 0.0, max(0.0, output - saved)))
    return outputs


class CrossingStorages:
    """Table of the storages that cross boundaries, with the layers that make, save and receive each of them."""

    def __init__(self, details: Sequence[MemoryDetail]) -> None:
        self.details = details
        self.bytes: list[int] = []
        self.origin: list[int] = []
        self.place: list[int] = []
        self.until: list[int] = []
        self.kept: list[bool] = []
        self.kept_by_reader: list[bool] = []
        self.relaying: dict[int, dict[int, int]] = {}
        """Layers that pass on a tensor of each storage, with the bytes of its gradient."""
        self.crossing_after: list[set[int]] = []
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
            self.crossing_after.append(set(crossing))
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
                # The gradient of a view has the size of the view, not of the storage.
                given = self.details[layer].inputs
                size = given[tensor.alias].bytes if tensor.alias < len(given) else self.bytes[storage]
                self.relaying.setdefault(storage, {}).setdefault(layer, size)
            return storage
        return self._new(layer, len(before), tensor)

    def saved(self) -> list[float]:
        """Return the bytes saved for backward, by layer. A saved storage counts at the layer that made it."""
        saved = [float(detail.internal_bytes) for detail in self.details]
        for size, origin, kept in zip(self.bytes, self.origin, self.kept, strict=True):
            if kept and origin >= 0:
                saved[origin] += size
        return saved

    def crossing(self) -> dict[tuple[int, int], Crossing]:
        """Return every storage by its maker: the layer that makes it, and its index among this layer's storages."""
        crossing = {}
        for n, size in enumerate(self.bytes):
            own = float(size)
            by = (own, 0.0, 0.0) if self.kept_by_reader[n] else (0.0, own, 0.0) if self.kept[n] else (0.0, 0.0, own)
            crossing[self.origin[n], self.place[n]] = Crossing(self.until[n], by)
        return crossing

    def relays(self) -> dict[Relay, int]:
        """Return the tensors that layers pass on, with bytes of gradients; consecutive layers form one relay."""
        relays = {}
        for n, sizes in self.relaying.items():
            begins = [layer for layer in sizes if layer - 1 not in sizes]
            ends = [layer for layer in sizes if layer + 1 not in sizes]
            for first, last in zip(begins, ends, strict=True):
                relays[Relay(self.origin[n], self.place[n], first, last)] = min(sizes[first], self.bytes[n])
        return relays

    def passing(self) -> list[int]:
        """Return, for each layer, the bytes of storages from earlier layers that cross the boundary after it."""
        return [sum([self.bytes[s] for s in each if self.origin[s] < n]) for n, each in enumerate(self.crossing_after)]

    def bytes_after(self) -> list[int]:
        """Return the bytes that cross the boundary after each layer; a storage of several tensors counts once."""
        return [sum([self.bytes[storage] for storage in each]) for each in self.crossing_after]

    def unkept_after(self) -> list[int]:
        """Return, for each layer, the bytes of storages that no layer saves and that cross the boundary after it."""
        return [sum([self.bytes[s] for s in each if not self.kept[s]]) for each in self.crossing_after]


def writes_received(details: Sequence[MemoryDetail]) -> list[bool]:
    """Return, for each layer, True if a stage that begins with this layer writes into its received input."""
    writes = [False]
    for detail in reversed(details):
        writes.append(detail.writes_input or (writes[-1] and any(tensor.alias >= 0 for tensor in detail.outputs)))
    return writes[:0:-1]
