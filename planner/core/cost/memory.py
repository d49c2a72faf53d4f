"""Peak memory of a stage that has a device to itself, over one training step.

    bytes at a moment = always + sum over parts of count * part
    peak              = largest of these, over the moments of the device's program

What parts there are, and how large, is in `planner.core.cost.parts`; how many of them are there at which moment in
`planner.core.cost.moments`. Here the two meet: for one stage, itemised; for many stages at once, as the solver asks;
and as they depend on which layers are recomputed. Devices with several stages: `planner.core.cost.device_memory`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import StageLayers, StageLevels
from planner.core.cost.moments import Moment, Moments
from planner.core.cost.parts import Parts, parts_of
from planner.core.cost.passing import is_simple
from planner.core.cost.stages import Stages, stages_in, with_arrays, with_layers_again
from planner.core.values.plan import Recompute, StageMemory

FloatArray = NDArray[np.float64]

_MOST_AT_ONCE: Final = 1 << 17
"""Stages of a window up to which single ones are taken from it, to bound transient memory."""


def stage_memory(
    costs: ChainCosts,
    first: int,
    end: int,
    moments: Moments,
    *,
    recompute: Recompute,
    recomputed: Collection[int] = (),
    reserve_bytes: int = 0,
) -> StageMemory:
    """Peak memory of the stage that runs layers `first`..`end - 1`, itemised at its highest moment.

    Args:
        costs: The chain at the plan's micro-batch size.
        first: First layer.
        end: One past the last layer.
        moments: Of the stage's device (see `planner.core.cost.moments.stage_moments`).
        recompute: On which micro-batches activations are dropped.
        recomputed: With `recompute="layers"`, the layers that are recomputed, counted along the chain.
        reserve_bytes: Added as an item of its own.
    """
    stages, recompute = one_stage(
        costs, first, end, micro_batches=moments.micro_batches, recompute=recompute, recomputed=recomputed
    )
    return _itemised(stages, recompute, moments, reserve_bytes)[0]


def stage_memories(
    costs: ChainCosts,
    intervals: Sequence[tuple[int, int]],
    moments: Sequence[Moments],
    *,
    recompute: Sequence[Recompute],
    recomputed: Sequence[Collection[int]],
    reserve_bytes: int,
) -> list[StageMemory]:
    """The same for each of several stages; of a simple chain many at once."""
    most = max(end - first for first, end in intervals)
    # Of stages alone it is known whether gradients go out to replicas, and which layers are recomputed.
    is_one_by_one = not is_simple(costs) or costs.bucket_bytes or "layers" in recompute
    if is_one_by_one or len(intervals) * most > _MOST_AT_ONCE:
        return [
            stage_memory(costs, *interval, each, recompute=choice, recomputed=layers, reserve_bytes=reserve_bytes)
            for interval, each, choice, layers in zip(intervals, moments, recompute, recomputed, strict=True)
        ]
    firsts, ends = np.array(intervals).T
    window = stages_in(costs, firsts, most, micro_batches=moments[0].micro_batches)
    columns = ends - firsts - 1
    never = np.broadcast_to(window.forward_only, window.shape)[np.arange(len(firsts)), columns]
    alike: dict[tuple[int, Recompute], list[int]] = {}
    for k, choice in enumerate(recompute):
        alike.setdefault((moments[k].in_flight, "never" if never[k] else choice), []).append(k)
    memories = [StageMemory()] * len(intervals)
    for (_, choice), places in alike.items():
        stages = _single(window, np.array(places), columns[places])
        for k, memory in zip(places, _itemised(stages, choice, moments[places[0]], reserve_bytes), strict=True):
            memories[k] = memory
    return memories


def _single(window: Stages, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Stages:
    """Single stages of a window, below one another in one column."""

    def of(array: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(array, window.shape)[rows, columns][:, None]

    single, peaks, law = with_arrays(window, of), with_arrays(window.peaks, of), with_arrays(window.law, of)
    return replace(single, shape=(len(rows), 1), peaks=peaks, law=law)


def _itemised(stages: Stages, recompute: Recompute, moments: Moments, reserve_bytes: int) -> list[StageMemory]:
    """Of the stages in the last column, each at its highest moment; of equally high ones at the first."""
    parts = parts_of(stages, recompute, in_flight=moments.in_flight)
    every = [
        {item: np.rint(np.broadcast_to(size, stages.shape)[:, -1]) for item, size in parts.at(moment).items()}
        for moment in parts.moments(moments)
    ]
    highest = np.argmax([np.sum(list(items.values()), axis=0) for items in every], axis=0)
    return [
        StageMemory.of(**{item: int(sizes[row]) for item, sizes in every[n].items()}, reserve=reserve_bytes)
        for row, n in enumerate(highest)
    ]


def one_stage(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int],
    in_halves: bool = False,
) -> tuple[Stages, Recompute]:
    """The stage that runs layers `first`..`end - 1`, in the last column, and what is recomputed there in effect."""
    layers = slice(first, end)
    stages = stages_in(costs, np.array([first]), layers, micro_batches=micro_batches, in_halves=in_halves)
    if recompute == "layers":
        every = StageLayers.of(costs, first, end)
        return with_layers_again(stages, every.levels(frozenset(recomputed))), recompute
    # Where nothing in front is trained, there is no backward, and the executor recomputes nothing.
    return stages, "never" if stages.forward_only[0, -1] else recompute


def interval_totals(
    costs: ChainCosts, firsts: NDArray[np.int64], stop: int, moments: Moments, *, choices: Sequence[Recompute]
) -> list[FloatArray]:
    """Bytes at the peak of stages whose last layer is one of `firsts[0]`..`stop - 1`, for each recompute choice.

    Args:
        costs: The chain at the plan's micro-batch size.
        firsts: First layers; must ascend.
        stop: One past the last layer of the longest stages.
        moments: Of each stage's device.
        choices: What is recomputed; not `layers`, which is known of one stage at a time.

    Returns:
        Arrays of shape (firsts, stop - firsts[0]); values left of a row's own first layer mean nothing. Otherwise
        they are the totals of `stage_memory`.

    Complexity: O(firsts · (stop - firsts[0])).
    """
    return totals_of(costs, firsts, slice(int(firsts[0]), stop), moments, choices=choices)


def totals_of(
    costs: ChainCosts,
    firsts: NDArray[np.int64],
    columns: slice | int,
    moments: Moments,
    *,
    choices: Sequence[Recompute],
) -> list[FloatArray]:
    """The same for the last layers or the lengths that `stages_in` calls `columns`: shape (firsts, columns)."""
    if "layers" in choices:
        raise ValueError("which layers is known of one stage at a time: ask `stage_memory`")
    stages = stages_in(costs, firsts, columns, micro_batches=moments.micro_batches)
    totals = {choice: _peaks(stages, moments, choice) for choice in choices}
    if not stages.forward_only.any():
        return list(totals.values())
    never = totals["never"] if "never" in totals else _peaks(stages, moments, "never")
    return [np.where(stages.forward_only, never, total) for total in totals.values()]


def _peaks(stages: Stages, moments: Moments, recompute: Recompute) -> FloatArray:
    parts = parts_of(stages, recompute, in_flight=moments.in_flight)
    # Items that no part adds to are of the same whole bytes at every moment.
    changing = {item for size in parts.sizes.values() for item in size.items}
    constant = sum((np.rint(size) for item, size in parts.always.items() if item not in changing), np.zeros((1, 1)))
    highest = np.zeros(stages.shape)
    for moment in parts.moments(moments):
        total = np.full(stages.shape, constant)
        for item, size in parts.at(moment).items():
            if item in changing:
                total += np.rint(size)
        np.maximum(highest, total, out=highest)
    return highest


class LinearMoment(NamedTuple):
    """The bytes of many stages at one moment, as `fixed + weight * saved + level` of each one's `StageLevels`."""

    fixed: FloatArray
    """Shape (firsts, stop - firsts[0]); parameters, optimizer state, buffers and the mini-batch's part included."""
    weight: int
    level: int | None
    """Position in `LayerPeaks` of the level that is part of it."""


def linear_moments(
    costs: ChainCosts, firsts: NDArray[np.int64], stop: int, moments: Moments
) -> tuple[LinearMoment, ...]:
    """The moments of `stage_memory(..., recompute="layers")`, as they depend on which layers are recomputed.

    Stages are those of `interval_totals`; values left of a row's own first layer mean nothing.
    """
    stages = stages_in(costs, firsts, slice(int(firsts[0]), stop), micro_batches=moments.micro_batches)
    empty = with_layers_again(stages, StageLevels(0.0, 0.0, 0.0, 0.0))
    parts = parts_of(empty, "layers", in_flight=moments.in_flight)
    return tuple(_linear(parts, moment, stages.shape) for moment in parts.moments(moments))


def _linear(parts: Parts, moment: Moment, shape: tuple[int, int]) -> LinearMoment:
    """A moment of stages that save nothing and whose levels are 0, and how much of these comes on top."""
    sizes = [(parts.sizes[name], count) for name, count in moment if name in parts.sizes]
    levels = [size.level for size, _ in sizes if size.level is not None]
    fixed = np.broadcast_to(np.asarray(sum(parts.at(moment).values())), shape)
    return LinearMoment(fixed, sum(count * size.saved for size, count in sizes), levels[0] if levels else None)
