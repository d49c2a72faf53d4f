"""Peak memory of a stage that has a device to itself, over one training step.

    bytes at a point in the step = always + sum over allocations of count * size
    peak                         = largest of these sums, over all points in the step

The sizes are computed by `planner.core.cost.allocations`, the counts by `planner.core.cost.peak_points`.
For devices with several stages, see `planner.core.cost.device_memory`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from planner.core.cost.allocations import MemoryByAllocation, stage_memory_by_allocation
from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import SavedAndPeaks, StageLayerMemory
from planner.core.cost.peak_points import AllocationsAtPoint, PeakPoints
from planner.core.cost.stages import StageMemoryTable, stage_memory_table, with_recomputed_layers
from planner.core.values.plan import Recompute, StageMemory


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
    stages, recompute = single_stage_memory_table(
        costs, first, end, micro_batches=points.micro_batches, recompute=recompute, recomputed=recomputed
    )
    memory = stage_memory_by_allocation(stages, recompute, in_flight=points.in_flight)
    every = [
        {item: int(np.rint(np.broadcast_to(size, stages.shape)[0, -1])) for item, size in memory.at(point).items()}
        for point in memory.peak_points(points)
    ]
    return StageMemory.of(**max(every, key=lambda items: sum(items.values())), reserve=reserve_bytes)


def single_stage_memory_table(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int],
    splits_backward: bool = False,
) -> tuple[StageMemoryTable, Recompute]:
    """Return the memory of a stage (layers `first` to `end - 1`), and its recompute choice: `recompute` or `never`.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        first: First layer.
        end: One past the last layer.
        micro_batches: Number of micro-batches.
        recompute: Requested recompute choice.
        recomputed: Recomputed layers, as indices in the chain, if `recompute` is `layers`.
        splits_backward: True if the schedule splits backwards.

    Returns:
        A table with one row, in which the last column is for the stage; and the stage's recompute choice. The choice is
        `never` if the stage has no backward, except if `recompute` is `layers`. Otherwise, it is `recompute`.
    """
    layers = slice(first, end)
    stages = stage_memory_table(
        costs, np.array([first]), layers, micro_batches=micro_batches, splits_backward=splits_backward
    )
    if recompute == "layers":
        every = StageLayerMemory.of(costs, first, end)
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
        lasts: Meaning of the columns. For a slice of layers, each column is for one last layer. For a number n, each
            column is for one stage length: column 0 for stages of 1 layer, column n - 1 for stages of n layers. A
            number is allowed only if the chain has no skip connections and no shared parameters.
        points: Points in the step at which the stages may have their peak.
        choices: Recompute choices; `layers` is not allowed.
    """
    if "layers" in choices:
        raise ValueError("`layers` differs from stage to stage: use `stage_memory`")
    stages = stage_memory_table(costs, firsts, lasts, micro_batches=points.micro_batches)
    totals = {choice: _peaks(stages, points, choice) for choice in choices}
    if not stages.forward_only.any():
        return list(totals.values())
    never = totals["never"] if "never" in totals else _peaks(stages, points, "never")
    return [np.where(stages.forward_only, never, total) for total in totals.values()]


def _peaks(stages: StageMemoryTable, points: PeakPoints, recompute: Recompute) -> FloatArray:
    memory = stage_memory_by_allocation(stages, recompute, in_flight=points.in_flight)
    # Components that are in no allocation have the same size at every point in the step.
    changing = {item for size in memory.sizes.values() for item in size.items}
    constant = sum((np.rint(size) for item, size in memory.always.items() if item not in changing), np.zeros((1, 1)))
    highest = np.zeros(stages.shape)
    for point in memory.peak_points(points):
        total = np.full(stages.shape, constant)
        for item, size in memory.at(point).items():
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
    stages = stage_memory_table(costs, firsts, slice(int(firsts[0]), stop), micro_batches=points.micro_batches)
    empty = with_recomputed_layers(stages, SavedAndPeaks(0.0, 0.0, 0.0, 0.0))
    memory = stage_memory_by_allocation(empty, "layers", in_flight=points.in_flight)
    return tuple(_linear_memory(memory, point, stages.shape) for point in memory.peak_points(points))


def _linear_memory(
    memory: MemoryByAllocation, point: AllocationsAtPoint, shape: tuple[int, int]
) -> StageMemoryFunction:
    sizes = [(memory.sizes[name], count) for name, count in point if name in memory.sizes]
    peaks = [size.peak for size, _ in sizes if size.peak is not None]
    fixed = np.broadcast_to(np.asarray(sum(memory.at(point).values())), shape)
    return StageMemoryFunction(fixed, sum(count * size.saved for size, count in sizes), peaks[0] if peaks else None)
