"""Peak memory of a device that runs several stages (chunks) of the chain, as in interleaved schedules.

    peak = max over t of sum over v of (always[v] + sum over p of counts[t, v, p] * sizes[v, p])

    t    point in the step    v    chunk of the device, 0 to V-1    p    allocation: one of `ALLOCATIONS`

Each chunk is a stage with the allocations of `planner.core.cost.allocations`. `counts` follow from the device's
instruction list (`planner.core.cost.peak_points`). Differences from a device with one stage:

- Every allocation is rounded to whole bytes, so that the memory of the chunks in a plan adds up to the device's peak.
- Parameters that two chunks share count once. A tensor that one chunk passes to the next chunk on the same device also
  counts once (`shared_bytes`, `subtract_shared`).
- A profile of compiled programs is treated as a profile without `MemoryDetail`.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from planner.core.cost.allocations import AllocationSize, memory_on_shared_device
from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import SavedAndPeaks
from planner.core.cost.memory import single_stage_memory_table
from planner.core.cost.peak_points import ALLOCATIONS, FORWARDS, RUNNING, WITH_BACKWARDS, AllocationName
from planner.core.cost.stages import StageMemoryTable, stage_memory_table, with_recomputed_layers
from planner.core.values.placement import Placement, device_of
from planner.core.values.plan import ITEMS, Item, Recompute, StageMemory

_MOST_PRODUCTS, _LEAST_ROWS = 2**17, 8
"""Limits of a block of partitions: most multiplications in its matrix product, and fewest partitions.

For larger matrix products, linear algebra libraries start threads, which takes more CPU time in all. If the limits
conflict, the second one applies.
"""

_MUCH: Final = 2.0**48
"""Bytes above any real size, yet small enough that sums with it are exact to one byte."""

_PLACE: Final[Mapping[AllocationName, int]] = {name: place for place, name in enumerate(ALLOCATIONS)}
_WITH_INPUT: Final[tuple[AllocationName, ...]] = ("held", "kept", *FORWARDS, *WITH_BACKWARDS)
"""Allocations that include the received input of their micro-batch."""
_PLACES_WITH_INPUT: Final = [_PLACE[name] for name in _WITH_INPUT]
_RUNNING: Final = [_PLACE[name] for name in RUNNING]
_ITEM_OF: Final[Mapping[AllocationName, Item]] = {
    **dict.fromkeys(("gradients", "input_backward_gradients"), "gradients"),
    "casts": "casts",
    **dict.fromkeys(("held", "kept", "weight_held", "input"), "in_flight"),
    **dict.fromkeys(("output_gradient", "input_gradient"), "transfer"),
    "optimizer_step": "working",
}
"""Component under which a plan lists each allocation. Allocations of running actions have several components."""


class ChunkMemory(NamedTuple):
    """Memory of one chunk of a device, in bytes."""

    always: StageMemory
    """Bytes that exist during the whole step, by component."""
    allocation_bytes: FloatArray
    """Bytes of one allocation of each kind (`ALLOCATIONS`), shape (allocations,)."""

    def without(self, shared: "SharedBytes", *, exact: bool) -> "ChunkMemory":
        """Return this memory minus `shared` (arrays of shape (1, 1)). `exact` is as in `subtract_shared`."""
        _, allocation_bytes = subtract_shared(np.zeros((1, 1)), self.allocation_bytes[None, None], shared, exact=exact)
        left = dict(self.always.items())
        for name in ("parameters", "optimizer") if exact else ("parameters", "optimizer", "gradients"):
            left[name] -= round(getattr(shared, name).item())
        return ChunkMemory(StageMemory.of(**left), allocation_bytes[0, 0])


class ChunkMemoryFunction(NamedTuple):
    """Memory of a chunk for any choice of recomputed layers; arrays have one entry per allocation (`ALLOCATIONS`).

    bytes of an allocation = max(least, rest + saved * S) + P

    S        bytes that one micro-batch saves for its backward; depends on the choice
    P        peak memory while a layer runs; depends on the choice
    least    lower bound of the bytes without P
    rest     bytes that belong neither to S nor to P
    saved    1 if the allocation includes S, else 0
    """

    always: float
    """Bytes that exist during the whole step."""
    least: FloatArray
    rest: FloatArray
    saved: IntArray
    peak: IntArray
    """For each kind of allocation, index of the `LayerPeaks` field added to its other bytes (P); -1 to add none."""

    def allocation_bytes(self, saved: FloatArray | float, peaks: FloatArray) -> FloatArray:
        """Return the bytes of a single allocation, for each kind in `ALLOCATIONS`; shape (..., allocations).

        Args:
            saved: Bytes S that one micro-batch saves, shape (..., 1).
            peaks: The three fields of `LayerPeaks`, then a 0; shape (..., 4). Each kind of allocation adds one of these
                values as P. The field `peak` has the value's index; -1 selects the 0.
        """
        sizes: FloatArray = np.maximum(self.least, self.rest + self.saved * saved) + peaks[..., self.peak]
        return sizes

    def without(self, shared: "SharedBytes", *, exact: bool) -> "ChunkMemoryFunction":
        """Return this memory minus `shared` (arrays of shape (1, 1)). `exact` is as in `subtract_shared`."""
        always, least = subtract_shared(np.full((1, 1), self.always), self.least[None, None], shared, exact=exact)
        _, rest = subtract_shared(np.zeros((1, 1)), self.rest[None, None], shared, exact=exact)
        return self._replace(always=float(always.item()), least=least[0, 0], rest=rest[0, 0])


class SharedBytes(NamedTuple):
    """Bytes to subtract from each stage, because another stage on the same device also stores them."""

    parameters: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    casts: FloatArray
    received: FloatArray
    """Input from a previous stage on the same device. It counts as output of the previous stage."""


def chunk_memory(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
    splits_backward: bool = False,
) -> ChunkMemory:
    """Return the memory of one chunk with the layers `first` to `end - 1`.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        first: First layer of the chunk.
        end: One past the last layer.
        micro_batches: Number of micro-batches.
        recompute: Recompute choice of the chunk.
        recomputed: Recomputed layers, as indices in the chain, if `recompute` is `layers`.
        splits_backward: True if the schedule splits backwards.
    """
    stages, recompute = single_stage_memory_table(
        costs,
        first,
        end,
        micro_batches=micro_batches,
        recompute=recompute,
        recomputed=recomputed,
        splits_backward=splits_backward,
    )
    memory = memory_on_shared_device(stages, recompute)
    always = {item: round(float(size[0, -1])) for item, size in memory.always.items()}
    return ChunkMemory(StageMemory.of(**always), memory.totals(stages.shape)[1:, 0, -1])


def chunk_memory_function(
    costs: ChainCosts, first: int, end: int, *, micro_batches: int, splits_backward: bool = False
) -> ChunkMemoryFunction:
    """Return the chunk's memory as a function of the choice of recomputed layers.

    To evaluate it, call `ChunkMemoryFunction.allocation_bytes` with the result of `StageLayerMemory.saved_and_peaks`.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        first: First layer of the chunk.
        end: One past the last layer.
        micro_batches: Number of micro-batches.
        splits_backward: True if the schedule splits backwards.
    """
    stages = stage_memory_table(
        costs, np.array([first]), slice(first, end), micro_batches=micro_batches, splits_backward=splits_backward
    )
    none, much = (
        memory_on_shared_device(with_recomputed_layers(stages, SavedAndPeaks(saved, 0.0, 0.0, 0.0)), "layers")
        for saved in (0.0, _MUCH)
    )
    totals = none.totals(stages.shape)[:, 0, -1]
    sizes = [none.sizes.get(name, AllocationSize({})) for name in ALLOCATIONS]
    saved = np.array([size.saved for size in sizes])
    return ChunkMemoryFunction(
        always=float(totals[0]),
        least=totals[1:],
        # For large S, the second function is the larger one.
        rest=much.totals(stages.shape)[1:, 0, -1] - saved * _MUCH,
        saved=saved,
        peak=np.array([-1 if size.peak is None else size.peak for size in sizes]),
    )


def allocation_bytes_of_stages(stages: StageMemoryTable, recompute: Recompute) -> FloatArray:
    """Return the permanent bytes of each stage, then the bytes of each allocation (`ALLOCATIONS`), as whole numbers.

    The shape is (1 + allocations, first layers, last layers). If `recompute` is `layers`, `stages` must come from
    `with_recomputed_layers`.
    """
    totals = memory_on_shared_device(stages, recompute).totals(stages.shape)
    if recompute in ("never", "layers") or not stages.forward_only.any():
        return totals
    # Stages without a backward recompute nothing.
    return np.where(stages.forward_only, memory_on_shared_device(stages, "never").totals(stages.shape), totals)


def shared_bytes(costs: ChainCosts, cuts: IntArray, num_devices: int, placement: Placement = "loop") -> SharedBytes:
    """Return the bytes to subtract from each stage, because another stage on the same device also stores them.

    Args:
        costs: Costs of the layers.
        cuts: First layer of every stage, then the number of layers, for each partition; shape (partitions, stages + 1).
        num_devices: Number of devices.
        placement: Placement of the stages on the devices.

    Returns:
        Bytes as whole numbers, in arrays of shape (partitions, stages).
    """
    device = _devices(cuts.shape[1] - 1, num_devices, placement)
    shared = np.zeros((len(SharedBytes._fields), len(cuts), cuts.shape[1] - 1))
    rows = np.arange(len(cuts))
    for tie in costs.ties:
        if not tie.is_pair_known:
            continue
        sizes = np.rint([tie.parameter_bytes, tie.gradient_bytes, tie.optimizer_bytes, tie.cast_bytes])
        # Shared parameters count in the later stage, because its backward runs first and allocates the gradients.
        second = (cuts[:, 1:-1] <= tie.second).sum(axis=1)
        is_open = np.ones(len(cuts), bool)
        # The nearest layer on the device counts. Within one stage, `StageMemoryTable` already counts tied layers once.
        for layer in (tie.first, *reversed(tie.earlier)):
            first = (cuts[:, 1:-1] <= layer).sum(axis=1)
            same_device = is_open & (device[second] == device[first])
            shares = same_device & (first != second)
            shared[: len(sizes), rows[shares], first[shares]] += sizes[:, None]
            is_open &= ~same_device
    handed_over = np.flatnonzero(device[1:] == device[:-1]) + 1
    first_layers = np.minimum(cuts[:, handed_over], costs.num_layers - 1)
    shared[-1][:, handed_over] = np.rint(costs.boundaries.input[first_layers])
    return SharedBytes(*shared)


@lru_cache(maxsize=64)
def _devices(num_stages: int, num_devices: int, placement: Placement) -> IntArray:
    return np.array([device_of(stage, num_devices, placement) for stage in range(num_stages)])


def most_shared_input_bytes(costs: ChainCosts, counts: IntArray | FloatArray) -> float:
    """Return an upper bound of the input bytes that two neighboring stages of one device share, at a point in the step.

    `counts`, of shape (allocations,), has the device's number of allocations of each kind (`ALLOCATIONS`) at this
    point.
    """
    largest = float(np.rint(costs.boundaries.input.max())) if costs.exact else 0.0
    return largest * float(counts[[_PLACE[name] for name in _WITH_INPUT]].sum())


def subtract_shared(
    always: FloatArray, allocation_bytes: FloatArray, shared: SharedBytes, *, exact: bool
) -> tuple[FloatArray, FloatArray]:
    """Return `always` and `allocation_bytes` minus `shared`, the bytes that another stage of the device also stores.

    Args:
        always: Permanent bytes, shape (partitions, stages).
        allocation_bytes: Bytes of one allocation of each kind (`ALLOCATIONS`), shape (partitions, stages, allocations).
        shared: Bytes to subtract.
        exact: True if each layer has a `MemoryDetail` (`ChainCosts.exact`). If True, shared gradients are subtracted
            from `allocation_bytes`, and so is the input from a stage on the same device (`shared.received`). If False,
            gradients are permanent bytes, so shared gradients are subtracted from `always`. The input is not
            subtracted.
    """
    allocation_bytes = allocation_bytes.copy()
    allocation_bytes[..., _PLACE["casts"]] -= shared.casts
    if exact:
        allocation_bytes[..., _PLACE["gradients"]] -= shared.gradients
        allocation_bytes[..., _PLACES_WITH_INPUT] = np.maximum(
            allocation_bytes[..., _PLACES_WITH_INPUT] - shared.received[..., None], 0.0
        )
    # Without a `MemoryDetail` of each layer, gradients are permanent.
    return always - shared.parameters - shared.optimizer - (0.0 if exact else shared.gradients), allocation_bytes


def stack_device_counts(counts: Sequence[FloatArray]) -> FloatArray:
    """Return the counts of all devices as one array for `device_peaks`.

    On the last axis, it has a 1 for the permanent bytes, then the counts of each kind of allocation.

    `counts` has one array per device: the number of allocations of each kind (`ALLOCATIONS`) at each point in the
    step, shape (points, chunks, allocations). The result has the shape (devices, points, chunks, 1 + allocations).
    """
    # Devices with fewer points than others repeat their last point.
    _, chunks, num_allocations = counts[0].shape
    every = np.ones((len(counts), max(map(len, counts)), chunks, 1 + num_allocations))
    for device, points in enumerate(counts):
        every[device, : len(points), :, 1:] = points
        every[device, len(points) :, :, 1:] = points[-1]
    return every


def device_peaks(stage_bytes: FloatArray, counts: FloatArray) -> FloatArray:
    """Return the peak memory of each device in bytes, shape (partitions, devices).

    Args:
        stage_bytes: Permanent bytes of each stage, then bytes of each kind of allocation (`ALLOCATIONS`); shape
            (partitions, devices, chunks, 1 + allocations).
        counts: Result of `stack_device_counts`.
    """
    by_device = stage_bytes.reshape(*stage_bytes.shape[:2], -1).transpose(1, 2, 0)
    by_point = counts.reshape(*counts.shape[:2], -1)
    size = max(_LEAST_ROWS, _MOST_PRODUCTS // by_point[0].size)
    starts = range(0, len(stage_bytes), size)
    blocks = [(by_point @ by_device[..., start : start + size]).max(axis=1) for start in starts]
    peaks: FloatArray = np.concatenate(blocks, axis=1).T
    return peaks


def device_peaks_by_choice(stage_bytes: FloatArray, choices: IntArray, counts: FloatArray) -> FloatArray:
    """Return the peak memory of a device in bytes, shape (partitions, combinations of recompute choices).

    Args:
        stage_bytes: Permanent bytes of each stage, then bytes of each kind of allocation (`ALLOCATIONS`); shape
            (choices, partitions, chunks, 1 + allocations).
        choices: Combinations of recompute choices, as indices into `stage_bytes`; shape (combinations, chunks).
        counts: Result of `stack_device_counts` for the device, shape (points, chunks, 1 + allocations).
    """
    by_chunk, by_point = stage_bytes.transpose(0, 2, 1, 3), counts.transpose(1, 2, 0)
    size = max(_LEAST_ROWS, _MOST_PRODUCTS // by_point[0].size)
    blocks = []
    for start in range(0, stage_bytes.shape[1], size):
        alive = by_chunk[:, :, start : start + size] @ by_point
        blocks.append(sum(alive[choice, chunk] for chunk, choice in enumerate(choices.T)).max(axis=2))
    peaks: FloatArray = np.concatenate(blocks, axis=1).T
    return peaks


def chunk_memory_at_peak(
    chunks: Sequence[ChunkMemory], counts: IntArray, reserve_bytes: int = 0
) -> tuple[StageMemory, ...]:
    """Return the memory of each chunk by component, at the point in the step when the device needs most memory.

    Args:
        chunks: Chunks of the device.
        counts: Number of allocations of each kind (`ALLOCATIONS`) at each point in the step, shape (points, chunks,
            allocations).
        reserve_bytes: Memory reserve of the device, counted in the first chunk.
    """
    allocation_bytes = np.stack([chunk.allocation_bytes for chunk in chunks])
    peak = counts[int((counts * allocation_bytes).sum(axis=(1, 2)).argmax())]
    items = (peak[:, :, None] * bytes_by_component(allocation_bytes)).sum(axis=1).astype(int)
    return tuple(
        StageMemory.of(
            **{item: getattr(chunk.always, item) + more for item, more in zip(ITEMS, of_chunk, strict=True)},
            reserve=reserve_bytes if v == 0 else 0,
        )
        for v, (chunk, of_chunk) in enumerate(zip(chunks, items.tolist(), strict=True))
    )


def bytes_by_component(allocation_bytes: FloatArray) -> FloatArray:
    """Divide the bytes of each kind of allocation (`ALLOCATIONS`) among the components that a plan lists (`ITEMS`).

    Args:
        allocation_bytes: Bytes of a single allocation, for each kind; whole numbers, shape (..., allocations).

    Returns:
        Shape (..., allocations, components). The sum over the components is `allocation_bytes`.
    """
    items = np.zeros((*allocation_bytes.shape, len(ITEMS)))
    for name, item in _ITEM_OF.items():
        items[..., _PLACE[name], ITEMS.index(item)] = allocation_bytes[..., _PLACE[name]]
    running = allocation_bytes[..., _RUNNING]
    # Of a running micro-batch, the bytes that it would also store while it waits count as in flight.
    waiting = np.minimum(allocation_bytes[..., _PLACE["held"], None], running)
    received = np.minimum(allocation_bytes[..., _PLACE["output_gradient"], None], running - waiting)
    received = np.where([name in WITH_BACKWARDS for name in RUNNING], received, 0.0)
    items[..., _RUNNING, ITEMS.index("in_flight")] = waiting
    items[..., _RUNNING, ITEMS.index("transfer")] = received
    items[..., _RUNNING, ITEMS.index("working")] = running - waiting - received
    return items
