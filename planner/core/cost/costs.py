"""A profile at one micro-batch size, as arrays over the layers: what the cost model computes with.

Between profiled micro-batch sizes everything is interpolated linearly. That is exact for saved bytes, which are affine
in the micro-batch size, and errs on the safe side for peaks, which are maxima of affine functions (convex).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.errors import UsageError
from planner.core.values.profile import BoundaryTensor, LayerProfile, MemoryDetail, Profile, ProgramMemory

__all__ = ["BUCKET_BYTES", "ChainCosts", "CostTable", "Tie", "costs_at", "covers", "saved_bytes"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BUCKET_BYTES = 4 * 2**20
"""Small gradients that replicas sum share a message of about this size; larger ones need no copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Layers `first` < `second` share parameters: a stage that holds both, and all between, holds these bytes once."""

    first: int
    second: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    cast_bytes: float = 0.0
    these_alone: bool = True
    """Whether these two layers are known to share so much, whatever lies between them."""
    earlier: tuple[int, ...] = ()
    """Layers in front of `first` that share the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCosts:
    """Costs of L layers for micro-batches of `micro_batch_size` samples.

    All arrays have shape (L,), times in microseconds, sizes in bytes, one micro-batch. "Level" means bytes alive
    above what was alive when the stage began this micro-batch, if the stage began at layer 0: subtract
    `saved[:i].sum()` for a stage that begins at layer i.
    """

    micro_batch_size: int
    names: tuple[str, ...]
    forward_us: FloatArray
    backward_us: FloatArray
    optimizer_us: FloatArray
    parameters: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    optimizer_peak: FloatArray
    optimizer_peaks_add: bool
    """Whether the optimizer works on all parameters at once, so that its transients add up."""
    buffers: FloatArray
    rewritten: FloatArray
    """What of the layers' state their forward writes: kept as it was for each micro-batch that is to be recomputed."""
    casts: FloatArray
    """Copies of weights that autocast holds from the first forward of a step to its last backward."""
    ties: tuple[Tie, ...]
    input: FloatArray
    """What crosses the boundary in front of each layer; for layer 0 the model's input."""
    output: FloatArray
    target: float
    """What the loss reads beside the output."""
    saved: FloatArray
    unsaved_output: FloatArray
    """The part of `output` that `saved` does not hold: what a stage that ends here holds in addition."""
    unkept_input: FloatArray
    """The part of `input` that no layer keeps: it counts in `forward_level` while its layer runs."""
    input_alive: FloatArray
    """The part of `input` that counts in `no_grad_peak`."""
    copied_input: FloatArray
    """What a stage that begins here copies, because its layers write into the input they receive."""
    forward_level: FloatArray
    no_grad_peak: FloatArray
    """Highest during a forward without gradients, layer by layer, input included unless it is the stage's own."""
    first_backward_level: FloatArray
    """During the first micro-batch's backward; parameter gradients that it allocates are counted."""
    backward_level: FloatArray
    """During a later backward; parameter gradients are not counted, those of `casts` behind the layer are."""
    end_twice_first: FloatArray
    """Of the first backward's level, the engine's output and its gradient, what is counted twice where a stage ends
    with the layer. Tensors that the layer did not make count as far as their gradients."""
    end_twice: FloatArray
    """Likewise of a later backward."""
    internal: FloatArray
    """The part of `saved` that never leaves the layer."""
    storage_from: IntArray
    """Shape (S,), as the next four: the layer that makes a storage which crosses boundaries; -1 for the model's input.

    Every output tensor of a layer has an entry; it is of no bytes where the tensor lies in another's storage.
    """
    storage_until: IntArray
    """The last layer that the storage is handed to; L for the model's output."""
    kept_by_readers: FloatArray
    """Its bytes where a layer that it is handed to keeps it, else 0."""
    kept_by_maker: FloatArray
    """Its bytes where the layer that makes it keeps it, and no other, else 0."""
    kept_by_nobody: FloatArray
    relayed_first: IntArray
    """Shape (R,), as the next two: of a tensor that passes by, the first layer that hands its gradient on as it is."""
    relayed_last: IntArray
    """The last of the layers that do so one after the other."""
    relayed: FloatArray
    """Bytes of that gradient."""
    exact: bool
    """Whether the levels come from exact records; else they are the additive bound of the two transient peaks."""
    compiled: bool
    """Whether layers have a record of what they need within one program; if not, the next six are zeros."""
    carried: FloatArray
    """Held there from a layer's forward to its backward."""
    program_level: FloatArray
    """Highest there, in a forward and backward of one micro-batch."""
    narrowed: FloatArray
    """Weights as products take them, held by a loop over micro-batches."""
    narrowed_input: FloatArray
    """Of one micro-batch, where the first layer's input is copied likewise."""
    padding: FloatArray
    """Of parameters and gradients."""
    laid_out: FloatArray
    """Of one micro-batch, the first layer's input once more, as it wants it to lie."""
    sparse_gradients: FloatArray
    """The part of `gradients` that is sparse: of one micro-batch (see `planner.core.cost.sparse`)."""
    sparse_peak: FloatArray
    """Transient bytes of the optimizer's step per byte of sparse gradients."""
    accumulated: FloatArray
    """Sparse gradients of the other micro-batches, beside `gradients`."""
    bucket_bytes: float = 0.0
    """Most that gradients take in a message to other replicas, a copy of them; 0 where there are none."""

    def of_replicas(self, replicas: int) -> "ChainCosts":
        """These costs in one of so many pipelines side by side."""
        return replace(self, bucket_bytes=float(BUCKET_BYTES) if replicas > 1 else 0.0)

    @property
    def has_backward(self) -> NDArray[np.bool_]:
        """Whether there is a backward behind each layer, because it or one in front is trained; shape (L,).

        A stage whose last layer has none computes nothing again, whatever the plan says, nor does such a layer by
        itself. Where no layer has gradients, the profile says nothing of them.
        """
        trained = np.cumsum(self.gradients) > 0
        return trained if trained[-1] else np.ones_like(trained)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.names)


def covers(profile: Profile, micro_batch_size: int, *, extrapolate: bool) -> bool:
    """Whether the profile says anything about this micro-batch size."""
    sizes = profile.micro_batch_sizes
    if extrapolate and len(sizes) > 1:
        return micro_batch_size >= 1
    return min(sizes) <= micro_batch_size <= max(sizes)


def saved_bytes(details: Sequence[MemoryDetail]) -> list[int]:
    """What each layer of a chain adds to what is held for backward, from the exact records of all layers."""
    return [int(size) for size in _Storages(details).saved()]


def costs_at(profile: Profile, micro_batch_size: int, *, extrapolate: bool = False) -> ChainCosts:
    """The costs of every layer at `micro_batch_size`; for several sizes `CostTable` saves most of the work.

    Raises:
        UsageError: As `CostTable.at`.
    """
    return CostTable(profile).at(micro_batch_size, extrapolate=extrapolate)


class CostTable:
    """A profile as arrays, from which the costs at any size are interpolated."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._exact = _has_detail(profile)
        sizes = len(profile.micro_batch_sizes)
        self._compiled = not self._exact and all(len(layer.program) == sizes for layer in profile.layers)
        self._records: dict[int, _Record] = {}

    def at(self, micro_batch_size: int, *, extrapolate: bool = False) -> ChainCosts:
        """The costs of every layer at `micro_batch_size`.

        Raises:
            UsageError: The profile does not cover that size (and `extrapolate` does not allow more, or cannot:
                one profiled size has no slope).
        """
        profile = self._profile
        if not covers(profile, micro_batch_size, extrapolate=extrapolate):
            low, high = min(profile.micro_batch_sizes), max(profile.micro_batch_sizes)
            raise UsageError(
                f"micro-batch size {micro_batch_size} is outside the profiled range {low} to {high}",
                hint="profile that size too (`gpipe-plan profile --batch-sizes`)"
                + (", or allow `--extrapolate`" if len(profile.micro_batch_sizes) > 1 else ""),
            )
        weights = _neighbours(profile.micro_batch_sizes, micro_batch_size)
        records = [(self._record(n), weight) for n, weight in weights]
        # Whether a tensor lies in another's storage may depend on the size: then it counts as one that sometimes
        # does not.
        places = sorted(set().union(*(record.crossing for record, _ in records)))
        storages = np.zeros((len(places), 3))
        for record, weight in records:
            crossing = record.crossing
            storages += weight * np.array([crossing[p].bytes if p in crossing else (0.0,) * 3 for p in places]).reshape(
                len(places), 3
            )
        until = [max(record.crossing[p].until for record, _ in records if p in record.crossing) for p in places]
        relays = sorted(set.intersection(*(set(record.relays) for record, _ in records)))
        relayed = [sum(weight * record.relays[relay] for record, weight in records) for relay in relays]

        def blend(get: Callable[[_Record], FloatArray]) -> FloatArray:
            return np.maximum(sum((weight * get(record) for record, weight in records), np.zeros(())), 0.0)

        memory = blend(lambda record: record.memory)
        return ChainCosts(
            micro_batch_size=micro_batch_size,
            forward_us=blend(lambda record: record.forward_us),
            backward_us=blend(lambda record: record.backward_us),
            target=float(blend(lambda record: record.target)),
            storage_from=np.array([place[0] for place in places], dtype=np.int64),
            storage_until=np.array(until, dtype=np.int64),
            kept_by_readers=np.maximum(storages[:, 0], 0.0),
            kept_by_maker=np.maximum(storages[:, 1], 0.0),
            kept_by_nobody=np.maximum(storages[:, 2], 0.0),
            relayed_first=np.array([relay.first for relay in relays], dtype=np.int64),
            relayed_last=np.array([relay.last for relay in relays], dtype=np.int64),
            relayed=np.maximum(np.array(relayed, dtype=float), 0.0),
            exact=self._exact,
            compiled=self._compiled,
            **self._constants,
            **dict(zip(_RECORD, memory, strict=True)),
        )

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """What does not depend on the size."""
        layers = self._profile.layers
        return {
            "names": tuple(layer.name for layer in layers),
            "optimizer_us": np.array([layer.optimizer_us for layer in layers]),
            "parameters": _constant(layers, lambda layer: layer.parameter_bytes),
            "optimizer": _constant(layers, lambda layer: layer.optimizer_bytes),
            "optimizer_peak": _constant(layers, lambda layer: layer.optimizer_peak_bytes),
            "optimizer_peaks_add": self._profile.optimizer_peak == "sum",
            "buffers": _constant(layers, lambda layer: layer.buffer_bytes),
            "rewritten": _constant(layers, lambda layer: layer.rewritten_bytes),
            "casts": _constant(layers, lambda layer: layer.cast_bytes),
            "sparse_peak": np.array([layer.optimizer_sparse_peak for layer in layers]),
            "accumulated": np.zeros(len(layers)),
            "ties": _ties(layers),
        }

    def _record(self, n: int) -> "_Record":
        if n not in self._records:
            layers = self._profile.layers
            if self._exact:
                details = [layer.detail[n] for layer in layers]
                storages = _Storages(details)
                memory, crossing = _exact_memory(layers, n, storages), storages.crossing()
                relays = storages.relays()
            else:
                memory, crossing, relays = _additive_memory(layers, n), _additive_crossing(layers, n), {}
            target = layers[-1].detail[n].target_bytes if self._exact else 0
            within_program = [[0.0] * len(layers)] * 6
            if self._compiled:
                programs = [layer.program[n] for layer in layers]
                within_program, target = _within_program(programs), programs[-1].target_bytes
                memory[0][0] = float(programs[0].input_bytes)
            self._records[n] = _Record(
                forward_us=np.array([layer.forward_us[n] for layer in layers], dtype=float),
                backward_us=np.array([layer.backward_us[n] for layer in layers], dtype=float),
                memory=np.array([*memory, *within_program, *self._gradients(n)], dtype=float),
                crossing=crossing,
                relays=relays,
                target=np.array(float(target)),
            )
        return self._records[n]

    def _gradients(self, n: int) -> list[list[float]]:
        layers = self._profile.layers
        sparse = [float(layer.detail[n].sparse_gradient_bytes) if self._exact else 0.0 for layer in layers]
        return [_first_gradients(layers, n) if self._exact else [float(_gradient_bytes(x)) for x in layers], sparse]


class _Record(NamedTuple):
    """What the profile says at one of its sizes."""

    forward_us: FloatArray
    backward_us: FloatArray
    memory: FloatArray
    """Rows as in `_RECORD`."""
    crossing: "dict[tuple[int, int], _Crossing]"
    relays: "dict[_Relay, int]"
    """With the bytes of the gradient."""
    target: FloatArray


_RECORD = (
    "input",
    "output",
    "saved",
    "unsaved_output",
    "unkept_input",
    "input_alive",
    "copied_input",
    "forward_level",
    "no_grad_peak",
    "first_backward_level",
    "backward_level",
    "end_twice_first",
    "end_twice",
    "internal",
    "carried",
    "program_level",
    "narrowed",
    "narrowed_input",
    "padding",
    "laid_out",
    "gradients",
    "sparse_gradients",
)


def _neighbours(sizes: Sequence[int], size: int) -> list[tuple[int, float]]:
    """Places in `sizes` whose values are blended (or continued beyond, if that is allowed), with their weights."""
    order = sorted(range(len(sizes)), key=lambda n: sizes[n])
    if size in sizes:
        return [(sizes.index(size), 1.0)]
    if len(sizes) == 1:
        return [(0, 1.0)]
    points = [sizes[n] for n in order]
    right = min(max(bisect_left(points, size), 1), len(points) - 1)
    share = (size - points[right - 1]) / (points[right] - points[right - 1])
    return [(order[right - 1], 1 - share), (order[right], share)]


def _constant(layers: Sequence[LayerProfile], get: Callable[[LayerProfile], int]) -> FloatArray:
    return np.array([get(layer) for layer in layers], dtype=float)


def _gradient_bytes(layer: LayerProfile) -> int:
    return layer.parameter_bytes if layer.gradient_bytes is None else layer.gradient_bytes


def _first_gradients(layers: Sequence[LayerProfile], n: int) -> list[float]:
    """By layer, what the first micro-batch's backward leaves behind."""
    sparse = [(layer.detail[n].sparse_parameter_bytes, layer.detail[n].sparse_gradient_bytes) for layer in layers]
    return [
        max(0.0, float(_gradient_bytes(layer) - parameters)) + gradients
        for layer, (parameters, gradients) in zip(layers, sparse, strict=True)
    ]


def _has_detail(profile: Profile) -> bool:
    return all(len(layer.detail) == len(profile.micro_batch_sizes) for layer in profile.layers)


def _within_program(programs: Sequence[ProgramMemory]) -> list[list[float]]:
    """The last rows of `_RECORD`."""
    carried = [float(program.carried_bytes) for program in programs]
    held = np.concatenate([[0.0], np.cumsum(carried)])
    return [
        carried,
        [held[n] + program.peak_bytes for n, program in enumerate(programs)],
        [float(program.narrowed_bytes) for program in programs],
        [float(program.narrowed_input_bytes) for program in programs],
        [float(2 * program.padding_bytes) for program in programs],
        [float(program.laid_out_bytes) for program in programs],
    ]


def _additive_memory(layers: Sequence[LayerProfile], n: int) -> list[list[float]]:
    """Rows of `_RECORD` from the required fields alone; the two peaks are transient above all that is held."""
    output = [float(layer.output_bytes[n]) for layer in layers]
    saved = [float(layer.saved_bytes[n]) for layer in layers]
    forward = [float(layer.forward_peak_bytes[n]) if layer.forward_peak_bytes else 0.0 for layer in layers]
    backward = [float(layer.backward_peak_bytes[n]) if layer.backward_peak_bytes else 0.0 for layer in layers]
    return [
        [0.0, *output[:-1]],
        output,
        saved,
        # Whether `saved` already holds the output is not known: a layer that saves nothing holds none of it.
        [max(0.0, out - kept) for out, kept in zip(output, saved, strict=True)],
        *([0.0] * len(layers) for _ in range(3)),
        forward,
        [s + f for s, f in zip(saved, forward, strict=True)],
        backward,
        backward,
        *([0.0] * len(layers) for _ in range(2)),
        # What is saved holds the output as far as it can, as above.
        [max(0.0, kept - out) for out, kept in zip(output, saved, strict=True)],
    ]


def _exact_memory(layers: Sequence[LayerProfile], size: int, storages: "_Storages") -> list[list[float]]:
    """Rows of `_RECORD` composed from the exact records of all layers.

    A storage may cross several boundaries (views, in-place layers) and is kept if any layer it crosses keeps it; it
    is counted once, at the layer that made it. That is what findings on real allocators showed to be exact.
    """
    details, saved = storages.details, storages.saved()
    held = np.concatenate([[0.0], np.cumsum(saved)])
    unkept = [storages.unkept_behind(n) for n in range(len(layers))]
    # The input that nobody keeps is still alive while its layer runs; the model's own input is counted elsewhere.
    input_alive = [0.0, *unkept[:-1]]
    gradients = np.concatenate([[0.0], np.cumsum(_first_gradients(layers, size))])
    casts = np.concatenate([[0.0], np.cumsum([layer.cast_bytes for layer in layers])])
    # A boundary is crossed tensor by tensor, also where several lie in one storage.
    received = [sum(t.bytes for t in d.inputs) for d in details]
    behind = [storages.bytes_behind(n) for n in range(len(layers))]
    boundaries = [received[0], *(max(pair) for pair in zip(behind, received[1:], strict=False)), behind[-1]]
    # Where a stage ends: its output, but for what the layers in front made and the layer's peak does not count, and
    # the gradient of all of it (of the loss, none is received).
    at_end = [2 * boundaries[n + 1] - storages.passing(n) for n in range(len(layers))]
    at_end[-1] -= boundaries[-1]
    return [
        [float(size) for size in boundaries[:-1]],
        [float(size) for size in boundaries[1:]],
        saved,
        unkept,
        input_alive,
        [0.0, *(float(size) for size in boundaries[1:-1])],
        [float(boundaries[n]) if _writes_received(details, n) else 0.0 for n in range(len(layers))],
        [held[n] + input_alive[n] + d.forward_peak_bytes for n, d in enumerate(details)],
        [float(d.no_grad_peak_bytes + (boundaries[n] if n else 0)) for n, d in enumerate(details)],
        # Gradients of the layers behind this one are there already: their sum is added for the stage's end, here
        # everything up to and including this layer is taken off.
        [held[n] + d.first_backward_peak_bytes - gradients[n + 1] + gradients[-1] for n, d in enumerate(details)],
        # Gradients of autocast's copies, likewise: they wait for the end of the backward.
        [held[n] + d.backward_peak_bytes - casts[n + 1] + casts[-1] for n, d in enumerate(details)],
        [
            _twice(d.first_backward_peak_bytes, d.end_first_backward_peak_bytes, at_end[n])
            for n, d in enumerate(details)
        ],
        [_twice(d.backward_peak_bytes, d.end_backward_peak_bytes, at_end[n]) for n, d in enumerate(details)],
        [float(d.internal_bytes) for d in details],
    ]


def _twice(peak_bytes: int, end_peak_bytes: int | None, at_end_bytes: float) -> float:
    return 0.0 if end_peak_bytes is None else max(0.0, peak_bytes + at_end_bytes - end_peak_bytes)


class _Relay(NamedTuple):
    """A tensor that passes by some layers, one after the other, which hand its gradient on as it is."""

    origin: int
    place: int
    first: int
    last: int


class _Crossing(NamedTuple):
    """A storage that crosses boundaries."""

    until: int
    bytes: tuple[float, float, float]
    """Kept by a layer that gets it, kept by its maker alone, kept by nobody: one of them is its size."""


def _additive_crossing(layers: Sequence[LayerProfile], n: int) -> dict[tuple[int, int], _Crossing]:
    """The storages that cross boundaries, as far as the required fields tell: one output for each layer."""
    outputs = {}
    for index, layer in enumerate(layers):
        output, saved = float(layer.output_bytes[n]), float(layer.saved_bytes[n])
        outputs[index, 0] = _Crossing(index + 1, (min(output, saved), 0.0, max(0.0, output - saved)))
    return outputs


class _Storages:
    """Which storage every boundary tensor lies in, where it was made, and whether any layer keeps it."""

    def __init__(self, details: Sequence[MemoryDetail]) -> None:
        self.details = details
        self.bytes: list[int] = []
        self.origin: list[int] = []
        self.place: list[int] = []
        self.until: list[int] = []
        self.kept: list[bool] = []
        self.kept_by_reader: list[bool] = []
        self.relaying: list[list[int]] = []
        self.behind: list[list[int]] = []
        crossing = [self._new(-1, place, tensor) for place, tensor in enumerate(details[0].inputs)]
        for layer, detail in enumerate(details):
            for storage in crossing:
                self.until[storage] = layer
            for storage, tensor in zip(crossing, detail.inputs, strict=False):
                self.kept[storage] |= tensor.kept
                self.kept_by_reader[storage] |= tensor.kept
            received, crossing = crossing, []
            for tensor in detail.outputs:
                crossing.append(self._output(layer, tensor, received, crossing))
            self.behind.append(crossing)
        for storage in crossing:
            self.until[storage] = len(details)

    def _new(self, origin: int, place: int, tensor: BoundaryTensor) -> int:
        self.bytes.append(tensor.bytes)
        self.origin.append(origin)
        self.place.append(place)
        self.until.append(origin)
        self.kept.append(tensor.kept)
        self.kept_by_reader.append(False)
        self.relaying.append([])
        return len(self.bytes) - 1

    def _output(self, layer: int, tensor: BoundaryTensor, received: list[int], before: list[int]) -> int:
        others = [*received, *before]
        if 0 <= tensor.alias < len(others):
            storage = others[tensor.alias]
            self.kept[storage] |= tensor.kept
            self.kept_by_reader[storage] |= tensor.kept and self.origin[storage] < layer
            if tensor.relayed and layer not in self.relaying[storage]:
                self.relaying[storage].append(layer)
            return storage
        return self._new(layer, len(before), tensor)

    def saved(self) -> list[float]:
        """Bytes that each layer adds to what is held for backward."""
        saved = [float(detail.internal_bytes) for detail in self.details]
        for size, origin, kept in zip(self.bytes, self.origin, self.kept, strict=True):
            if kept and origin >= 0:
                saved[origin] += size
        return saved

    def crossing(self) -> dict[tuple[int, int], _Crossing]:
        """All of them, by origin and place among its outputs."""
        found = {}
        for n, size in enumerate(self.bytes):
            by = 0 if self.kept_by_reader[n] else 1 if self.kept[n] else 2
            bytes_by = (float(size * (by == 0)), float(size * (by == 1)), float(size * (by == 2)))
            found[self.origin[n], self.place[n]] = _Crossing(self.until[n], bytes_by)
        return found

    def relays(self) -> dict[_Relay, int]:
        """As few as there are."""
        found = {}
        for n, layers in enumerate(self.relaying):
            begins = [layer for layer in layers if layer - 1 not in layers]
            ends = [layer for layer in layers if layer + 1 not in layers]
            for first, last in zip(begins, ends, strict=True):
                found[_Relay(self.origin[n], self.place[n], first, last)] = self.bytes[n]
        return found

    def passing(self, layer: int) -> int:
        """Bytes behind `layer` that a layer in front of it made."""
        return sum(self.bytes[s] for s in set(self.behind[layer]) if self.origin[s] < layer)

    def bytes_behind(self, layer: int) -> int:
        return sum(self.bytes[storage] for storage in set(self.behind[layer]))

    def unkept_behind(self, layer: int) -> float:
        """Bytes behind `layer` that no layer keeps."""
        return float(sum(self.bytes[s] for s in set(self.behind[layer]) if not self.kept[s]))


def _writes_received(details: Sequence[MemoryDetail], first: int) -> bool:
    """Whether a stage that begins at `first` writes into what it receives, at once or through views of it."""
    for detail in details[first:]:
        if detail.writes_input:
            return True
        if all(tensor.alias < 0 for tensor in detail.outputs):
            return False
    return False


def _ties(layers: Sequence[LayerProfile]) -> tuple[Tie, ...]:
    ties = []
    for second, layer in enumerate(layers):
        if not layer.tied:
            continue
        owners = [
            first
            for first, other in enumerate(layers[:second])
            if any(name == other.name or name.startswith(other.name + ".") for name in layer.tied)
        ]
        trained = _trained_surely(layer)
        for first, size, these_alone, earlier in _shared(layers, owners, layer.tied_bytes):
            gradient_bytes = trained * size / layer.tied_bytes
            ties.append(
                Tie(
                    first=first,
                    second=second,
                    parameter_bytes=size,
                    gradient_bytes=gradient_bytes,
                    optimizer_bytes=layer.optimizer_bytes * gradient_bytes / max(1, _gradient_bytes(layer)),
                    cast_bytes=min(_casts_surely(layers[first], size), _casts_surely(layer, size)),
                    these_alone=these_alone,
                    earlier=earlier,
                )
            )
    return tuple(ties)


def _trained_surely(layer: LayerProfile) -> float:
    """Bytes of gradients that must be of tied parameters, which may be frozen: all others have as many as they are."""
    return max(0.0, _gradient_bytes(layer) - (layer.parameter_bytes - layer.tied_bytes))


def _casts_surely(layer: LayerProfile, tied_bytes: int) -> float:
    """Bytes of copies that must be of tied parameters: those of all others are half as large as these at most."""
    return max(0.0, layer.cast_bytes - (layer.parameter_bytes - tied_bytes) / 2)


def _shared(
    layers: Sequence[LayerProfile], owners: Sequence[int], tied_bytes: int
) -> list[tuple[int, int, bool, tuple[int, ...]]]:
    """By earlier layer that a stage must hold too, to hold some of `tied_bytes` once: the rest of `Tie`."""
    if not owners or not tied_bytes:
        return []
    theirs = [layers[first].tied_bytes for first in owners]
    if min(theirs) >= tied_bytes:
        return [(owners[-1], tied_bytes, True, tuple(owners[:-1]))]  # all share one and the same: the nearest will do
    if sum(theirs) <= tied_bytes:
        return [(first, size, True, ()) for first, size in zip(owners, theirs, strict=True)]  # each shares another
    return [(owners[0], tied_bytes, False, ())]  # not told apart: only a stage that holds them all is sure
