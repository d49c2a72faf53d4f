"""Tensor storages that layers pass to later layers, the layers that create them, and the layers that save them.

A storage may pass through several layers (views, in-place layers, skip connections). It is saved if any layer saves a
tensor in it. Its bytes count once, for the layer that created it, because an allocator allocates a storage only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.core.values.profile import BoundaryTensor, LayerProfile, MemoryDetail


class PassedTensor(NamedTuple):
    """Tensor that consecutive layers pass on unchanged. They also pass its gradient back unchanged."""

    origin: int
    place: int
    first: int
    last: int


class CrossingBytes(NamedTuple):
    """Bytes of a storage that crosses layer boundaries, divided by which layers save it for backward."""

    until: int
    bytes: tuple[float, float, float]
    """Bytes that a receiving layer saves, bytes that only the creating layer saves, and bytes that no layer saves."""


def crossing_storages_without_details(layers: Sequence[LayerProfile], n: int) -> dict[tuple[int, int], CrossingBytes]:
    """Return the output of each layer as one storage, for layers without `MemoryDetail`.

    Keys are (index of the layer, index of the storage among those that this layer creates). The second index is always
    0, because a layer's output counts as one storage. Only the next layer is assumed to receive the storage.

    Args:
        layers: Layers of the chain.
        n: Index of a micro-batch size in the profile.
    """
    outputs = {}
    for index, layer in enumerate(layers):
        output, saved = float(layer.output_bytes[n]), float(layer.saved_bytes[n])
        outputs[index, 0] = CrossingBytes(index + 1, (min(output, saved), 0.0, max(0.0, output - saved)))
    return outputs


@dataclass(slots=True, eq=False)
class Storage:
    """Storage that layers pass to later layers, with the layers that create, save and receive it."""

    origin: int
    """Layer that creates the storage; -1 for the model's input."""
    place: int
    """Index among the storages that layer `origin` creates."""
    bytes: int
    kept: bool
    """True if any layer saves the storage."""
    until: int
    """Last layer that receives the storage."""
    kept_by_reader: bool = False
    relaying: dict[int, int] = field(default_factory=dict)
    """Layers that pass on a tensor of the storage, with the bytes of its gradient."""


class CrossingStorages:
    """All storages that layers of a chain pass to later layers."""

    def __init__(self, details: Sequence[MemoryDetail]) -> None:
        self.details = details
        self.storages: list[Storage] = []
        self.crossing_after: list[set[Storage]] = []
        """Storages that cross the boundary after each layer."""
        self.received: list[list[Storage]] = []
        """Storages of the input tensors of each layer."""
        crossing = [self._new(-1, place, tensor) for place, tensor in enumerate(details[0].inputs)]
        for layer, detail in enumerate(details):
            for storage in crossing:
                storage.until = layer
            for storage, tensor in zip(crossing, detail.inputs, strict=False):
                storage.kept |= tensor.kept
                storage.kept_by_reader |= tensor.kept
            received, crossing = crossing, []
            self.received.append(received)
            for tensor in detail.outputs:
                crossing.append(self._output(layer, tensor, received, crossing))
            self.crossing_after.append(set(crossing))
        for storage in crossing:
            storage.until = len(details)

    def _new(self, origin: int, place: int, tensor: BoundaryTensor) -> Storage:
        storage = Storage(origin, place, tensor.bytes, tensor.kept, until=origin)
        self.storages.append(storage)
        return storage

    def _output(self, layer: int, tensor: BoundaryTensor, received: list[Storage], before: list[Storage]) -> Storage:
        crossing = [*received, *before]
        if not 0 <= tensor.alias < len(crossing):
            return self._new(layer, len(before), tensor)
        storage = crossing[tensor.alias]
        storage.kept |= tensor.kept
        storage.kept_by_reader |= tensor.kept and storage.origin < layer
        if tensor.relayed and tensor.carries:
            # The gradient of a view has the size of the view, not of the storage.
            given = self.details[layer].inputs
            size = given[tensor.alias].bytes if tensor.alias < len(given) else storage.bytes
            storage.relaying.setdefault(layer, size)
        return storage

    def saved(self) -> list[float]:
        """Return the bytes that each layer saves for backward; a saved storage counts for the layer that creates it."""
        saved = [float(detail.internal_bytes) for detail in self.details]
        for storage in self.storages:
            if storage.kept and storage.origin >= 0:
                saved[storage.origin] += storage.bytes
        return saved

    def crossing_bytes(self) -> dict[tuple[int, int], CrossingBytes]:
        """Return the bytes of each storage, by the layer that creates it and its index among that layer's storages."""
        crossing = {}
        for each in self.storages:
            own = float(each.bytes)
            by = (own, 0.0, 0.0) if each.kept_by_reader else (0.0, own, 0.0) if each.kept else (0.0, 0.0, own)
            crossing[each.origin, each.place] = CrossingBytes(each.until, by)
        return crossing

    def relays(self) -> dict[PassedTensor, int]:
        """Return the tensors that layers pass on unchanged, each with the bytes of its gradient."""
        relays = {}
        for each in self.storages:
            sizes = each.relaying
            begins = [layer for layer in sizes if layer - 1 not in sizes]
            ends = [layer for layer in sizes if layer + 1 not in sizes]
            for first, last in zip(begins, ends, strict=True):
                relays[PassedTensor(each.origin, each.place, first, last)] = min(sizes[first], each.bytes)
        return relays

    def passing(self) -> list[int]:
        """Return the bytes of storages that cross the boundary after each layer and that an earlier layer created."""
        return [sum([s.bytes for s in each if s.origin < n]) for n, each in enumerate(self.crossing_after)]

    def bytes_after(self) -> list[int]:
        """Return, for the boundary after each layer, the bytes that cross it; a storage counts once."""
        return [sum([storage.bytes for storage in each]) for each in self.crossing_after]

    def unsaved_bytes_after(self) -> list[int]:
        """Return, for the boundary after each layer, the bytes of storages that cross it and that no layer saves."""
        return [sum([storage.bytes for storage in each if not storage.kept]) for each in self.crossing_after]


def writes_received(details: Sequence[MemoryDetail]) -> list[bool]:
    """Return, for each layer, True if a stage that begins with this layer writes into its received input."""
    writes = [False]
    for detail in reversed(details):
        writes.append(detail.writes_input or (writes[-1] and any(tensor.alias >= 0 for tensor in detail.outputs)))
    return writes[:0:-1]
