"""Peak memory of a stage that has a device to itself, over one training step.

    bytes at a point in the step = always + sum over parts of count * size
    peak                         = largest of these sums, over all points in the step

The sizes are computed by `planner.core.cost.parts`, the counts by `planner.core.cost.peak_points`.
For devices with several stages, see `planner.core.cost.device_memory`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import SavedAndPeaks, StageLayers
from planner.core.cost.parts import MemoryParts, stage_memory_parts
from planner.core.cost.passing import has_no_skips_or_ties
from planner.core.cost.peak_points import PartsAtPoint, PeakPoints
from planner.core.cost.stages import StageTable, map_arrays, stage_table, with_recomputed_layers
from planner.core.values.plan import Recompute, StageMemory

_MOST_AT_ONCE: Final = 1 << 17
"""Largest number of stages in one table. Beyond it, each stage is computed alone, to limit transient memory."""


def stage_memory(
    costs: ChainCosts,
    first: int,
    end: int,
    points: PeakPoints,
    *,
    recompute: Recompute,
    recomputed: Collection[int] = (),
    reserve_bytes: int = 0,
) -> StageMemory:
    """Return the peak memory of the stage with the layers `first` to `end - 1`, by component.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        first: First layer.
        end: One past the last layer.
        points: Points in the step at which the stage may have its peak (`stage_peak_points`).
        recompute: Recompute choice of the stage.
        recomputed: Recomputed layers, as indices in the chain, if `recompute` is `layers`.
        reserve_bytes: Memory reserve of the device, which becomes the component `reserve`.
    """
    stages, recompute = single_stage_table(
        costs, first, end, micro_batches=points.micro_batches, recompute=recompute, recomputed=recomputed
    )
    return _memory_at_peak(stages, recompute, points, reserve_bytes)[0]


def stage_memories(
    costs: ChainCosts,
    intervals: Sequence[tuple[int, int]],
    points: Sequence[PeakPoints],
    *,
    recompute: Sequence[Recompute],
    recomputed: Sequence[Collection[int]],
    reserve_bytes: int,
) -> list[StageMemory]:
    """Return the peak memory of several stages, by component; see `stage_memory`.

    In a chain without skip connections and shared parameters, all stages are computed together, which is faster.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        intervals: First layer of each stage, and one past its last layer.
        points: Points in the step at which each stage may have its peak.
        recompute: Recompute choice of each stage.
        recomputed: Recomputed layers of each stage, as indices in the chain, if its choice is `layers`.
        reserve_bytes: Memory reserve of each device.
    """
    most = max(end - first for first, end in intervals)
    # Messages to replicas and recomputed layers are known only for single stages, not for a table.
    is_one_by_one = not has_no_skips_or_ties(costs) or costs.bucket_bytes or "layers" in recompute
    if is_one_by_one or len(intervals) * most > _MOST_AT_ONCE:
        return [
            stage_memory(costs, *interval, each, recompute=choice, recomputed=layers, reserve_bytes=reserve_bytes)
            for interval, each, choice, layers in zip(intervals, points, recompute, recomputed, strict=True)
        ]
    firsts, ends = np.array(intervals).T
    table = stage_table(costs, firsts, most, micro_batches=points[0].micro_batches)
    columns = ends - firsts - 1
    never = np.broadcast_to(table.forward_only, table.shape)[np.arange(len(firsts)), columns]
    alike: dict[tuple[int, Recompute], list[int]] = {}
    for k, choice in enumerate(recompute):
        alike.setdefault((points[k].in_flight, "never" if never[k] else choice), []).append(k)
    memories = [StageMemory()] * len(intervals)
    for (_, choice), places in alike.items():
        stages = _select_stages(table, np.array(places), columns[places])
        for k, memory in zip(places, _memory_at_peak(stages, choice, points[places[0]], reserve_bytes), strict=True):
            memories[k] = memory
    return memories


def _select_stages(table: StageTable, rows: IntArray, columns: IntArray) -> StageTable:
    def of(array: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(array, table.shape)[rows, columns][:, None]

    single, peaks, memory_model = (
        map_arrays(table, of),
        map_arrays(table.peaks, of),
        map_arrays(table.memory_model, of),
    )
    return replace(single, shape=(len(rows), 1), peaks=peaks, memory_model=memory_model)


def _memory_at_peak(
    stages: StageTable, recompute: Recompute, points: PeakPoints, reserve_bytes: int
) -> list[StageMemory]:
    parts = stage_memory_parts(stages, recompute, in_flight=points.in_flight)
    every = [
        {item: np.rint(np.broadcast_to(size, stages.shape)[:, -1]) for item, size in parts.at(point).items()}
        for point in parts.peak_points(points)
    ]
    highest = np.argmax([np.sum(list(items.values()), axis=0) for items in every], axis=0)
    return [
        StageMemory.of(**{item: int(sizes[row]) for item, sizes in every[n].items()}, reserve=reserve_bytes)
        for row, n in enumerate(highest)
    ]


def single_stage_table(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int],
    splits_backward: bool = False,
) -> tuple[StageTable, Recompute]:
    """Return a table whose last column has the stage, and its recompute choice: `never` if it has no backward.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        first: First layer.
        end: One past the last layer.
        micro_batches: Number of micro-batches.
        recompute: Requested recompute choice.
        recomputed: Recomputed layers, as indices in the chain, if `recompute` is `layers`.
        splits_backward: True if the schedule splits backwards.
    """
    layers = slice(first, end)
    stages = stage_table(costs, np.array([first]), layers, micro_batches=micro_batches, splits_backward=splits_backward)
    if recompute == "layers":
        every = StageLayers.of(costs, first, end)
        return with_recomputed_layers(stages, every.saved_and_peaks(frozenset(recomputed))), recompute
    # If no layer up to the stage's end is trained, there is no backward, and the executor recomputes nothing.
    return stages, "never" if stages.forward_only[0, -1] else recompute


def peak_bytes_of_stages(
    costs: ChainCosts,
    firsts: IntArray,
    lasts: slice | int,
    points: PeakPoints,
    *,
    choices: Sequence[Recompute],
) -> list[FloatArray]:
    """Return the peak memory of stages in bytes: one array for each recompute choice.

    Arrays have one row per first layer. Entries for stages that do not exist are meaningless, for example if the last
    layer is before the first.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        firsts: First layers, ascending.
        lasts: Slice of last layers, one per column. Or a number n: column j is for stages of j + 1 layers, j < n. A
            number is allowed only if the chain has no skip connections and no shared parameters.
        points: Points in the step at which the stages may have their peak.
        choices: Recompute choices; `layers` is not allowed.
    """
    if "layers" in choices:
        raise ValueError("`layers` differs from stage to stage: use `stage_memory`")
    stages = stage_table(costs, firsts, lasts, micro_batches=points.micro_batches)
    totals = {choice: _peaks(stages, points, choice) for choice in choices}
    if not stages.forward_only.any():
        return list(totals.values())
    never = totals["never"] if "never" in totals else _peaks(stages, points, "never")
    return [np.where(stages.forward_only, never, total) for total in totals.values()]


def _peaks(stages: StageTable, points: PeakPoints, recompute: Recompute) -> FloatArray:
    parts = stage_memory_parts(stages, recompute, in_flight=points.in_flight)
    # Components that are in no part have the same size at every point in the step.
    changing = {item for size in parts.sizes.values() for item in size.items}
    constant = sum((np.rint(size) for item, size in parts.always.items() if item not in changing), np.zeros((1, 1)))
    highest = np.zeros(stages.shape)
    for point in parts.peak_points(points):
        total = np.full(stages.shape, constant)
        for item, size in parts.at(point).items():
            if item in changing:
                total += np.rint(size)
        np.maximum(highest, total, out=highest)
    return highest


class StageMemoryFunction(NamedTuple):
    """Memory of many stages at one point in the step, in bytes, as a function of a `SavedAndPeaks` s.

    Memory is `fixed + weight * s.saved`, plus the peak of s that `peak` selects.
    """

    fixed: FloatArray
    """Bytes that do not depend on the recomputed layers; one row per first layer, one column per last layer."""
    weight: int
    """Number of micro-batches with saved activations."""
    peak: int | None
    """Index of the peak in `LayerPeaks`; None to add no peak."""


def stage_memory_functions(
    costs: ChainCosts, firsts: IntArray, stop: int, points: PeakPoints
) -> tuple[StageMemoryFunction, ...]:
    """Return the memory of stages as functions of the choice of recomputed layers, one for each point in the step.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        firsts: First layers of the stages, ascending.
        stop: Stages end before this layer.
        points: Points in the step at which the stages may have their peak.

    Returns:
        One function for each point. Its arrays have one entry for each pair of a first layer in `firsts` and a last
        layer from `firsts[0]` to `stop - 1`. Entries whose last layer is before the first layer are undefined.
    """
    stages = stage_table(costs, firsts, slice(int(firsts[0]), stop), micro_batches=points.micro_batches)
    empty = with_recomputed_layers(stages, SavedAndPeaks(0.0, 0.0, 0.0, 0.0))
    parts = stage_memory_parts(empty, "layers", in_flight=points.in_flight)
    return tuple(_linear_memory(parts, point, stages.shape) for point in parts.peak_points(points))


def _linear_memory(parts: MemoryParts, point: PartsAtPoint, shape: tuple[int, int]) -> StageMemoryFunction:
    sizes = [(parts.sizes[name], count) for name, count in point if name in parts.sizes]
    peaks = [size.peak for size, _ in sizes if size.peak is not None]
    fixed = np.broadcast_to(np.asarray(sum(parts.at(point).values())), shape)
    return StageMemoryFunction(fixed, sum(count * size.saved for size, count in sizes), peaks[0] if peaks else None)
