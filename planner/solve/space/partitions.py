"""Step time and memory of many partitions at once."""

from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, starmap
from math import comb, inf

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.device_memory import (
    ChunkMemoryFunction,
    SharedBytes,
    allocation_bytes_of_stages,
    chunk_memory_function,
    device_peaks,
    device_peaks_by_choice,
    shared_bytes,
    stack_device_counts,
    subtract_shared,
)
from planner.core.cost.layer_memory import SavedAndPeaks, most_bytes_freed, saved_and_peaks_without_recomputation
from planner.core.cost.peak_points import ALLOCATIONS, RUNNING, allocation_counts_at_points, peak_allocation_counts
from planner.core.cost.simulate import makespans
from planner.core.cost.stage_time import (
    CHOICES,
    SplitBackwardTimes,
    StageBusyTimes,
    optimizer_delay_us,
    optimizer_slack_us,
)
from planner.core.cost.stages import StageMemoryTable, stage_memory_table, with_recomputed_layers
from planner.core.errors import UsageError
from planner.core.schedule import Action, Schedule
from planner.core.values.placement import device_of, stages_on
from planner.solve.space.case import Case
from planner.solve.space.problem import LinkTimes
from planner.solve.space.tables import allowed_choices, fill_stage_tables

_STEPS = (-4, -2, -1, 1, 2, 4)

_WIDEST = 6
"""Largest number of layers of a stage, as a multiple of the mean."""


class Evaluator:
    """Computation of step time and memory for many partitions at once, all on `num_devices` devices.

    Cuts have shape (partitions, stages + 1). Recompute choices are indices into `CHOICES`, shape (partitions, stages).
    """

    def __init__(self, case: Case, num_devices: int, *, most_layers: int | None = None) -> None:
        self.case = case
        self.num_devices = num_devices
        self.num_stages = num_devices * case.chunks
        cluster = case.cluster
        placement = case.schedule.placement
        devices = [device_of(s, num_devices, placement) for s in range(self.num_stages + 1)]
        self.device_of_stage = np.array(devices[:-1])
        self.stages_by_device = [stages_on(d, num_devices, case.chunks, placement) for d in range(num_devices)]
        """Indices of the stages of each device, ascending."""
        self.stages = np.array(self.stages_by_device)
        """The indices in `stages_by_device` as an array, shape (devices, stages per device)."""
        self.speeds = np.array([cluster.speed(d) for d in devices[:-1]])
        links = [
            cluster.link_between(*ends, num_devices=num_devices, replicas=case.replicas) for ends in pairwise(devices)
        ]
        times = {link: LinkTimes.of(link, case.sums).transfer_us for link in set(links)}
        self.transfer_us = np.stack([times[link] for link in links])
        self.blocking = np.array([link.blocking for link in links])
        self.allowed = allowed_choices(case.policy, case.micro_batches)
        """Allowed recompute choices: indices into `CHOICES`, fastest first."""
        share = -(-case.costs.num_layers // self.num_stages)
        self.most_layers = most_layers or min(case.costs.num_layers, _WIDEST * share)
        """Number of layers of the longest stage in the memory tables."""

    @property
    def num_actions(self) -> int:
        """Number of actions in a step."""
        return (3 if self.case.schedule.splits_backward else 2) * self.case.micro_batches * self.num_stages

    @property
    def has_enough_layers(self) -> bool:
        """Return True if the layers can be divided into `num_stages` stages."""
        balance = self.case.rules.balance
        return self.case.costs.num_layers >= self.num_stages and (not balance or len(balance) == self.num_stages)

    @property
    def num_partitions(self) -> int:
        """Number of ways to divide the layers into `num_stages` stages; 1 if the cuts are fixed."""
        return 1 if self.case.rules.balance is not None else comb(self.case.costs.num_layers - 1, self.num_stages - 1)

    @property
    def can_run(self) -> bool:
        """Return True if the schedule supports this number of devices, and there are enough layers for all stages."""
        with suppress(UsageError):
            return self.has_enough_layers and bool(self.actions)
        return False

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of each device, in order.

        Raises:
            UsageError: The schedule cannot run with this number of devices or micro-batches.
        """
        case = self.case
        return case.schedule.actions(self.num_devices, case.micro_batches, case.chunks)

    def with_schedule(self, schedule: Schedule) -> "Evaluator":
        """Return the evaluator for another schedule that places the stages on the same devices."""
        other = copy(self)
        other.case = replace(self.case, schedule=schedule)
        for known in ("actions", "peak_allocation_counts", "_counts"):
            vars(other).pop(known, None)
        vars(other)["stage_allocation_bytes"] = self.stage_allocation_bytes
        return other

    def durations(
        self, cuts: IntArray, choices: IntArray
    ) -> tuple[StageBusyTimes, SplitBackwardTimes, FloatArray, FloatArray]:
        """Return times of stages (with whole and with split backwards), transfers and optimizers.

        Args:
            cuts: Cuts of each partition.
            choices: Index of the recompute choice of each stage of each partition.

        Returns:
            Microseconds. With shape (partitions, stages): stage times with whole backwards, stage times with split
            backwards, and transfer times. With shape (partitions, devices): times of all-reduces and optimizer steps.
        """
        busy, crossing, own = self._times(cuts, choices)
        return busy, self._split_backward_times(busy, cuts), crossing, own

    def step_us(self, cuts: IntArray, choices: IntArray, recomputed_layers_us: FloatArray | None = None) -> FloatArray:
        """Return simulated step times in microseconds, optimizer steps included.

        Args:
            cuts: Cuts of each partition, shape (partitions, stages + 1).
            choices: Recompute choice of each stage, shape (partitions, stages).
            recomputed_layers_us: Forward time of each stage's recomputed layers on the profiled device, if the stage's
                choice is `LAYERS`; shape (partitions, stages). None if no stage has this choice.
        """
        busy, crossing, own = self._times(cuts, choices, recomputed_layers_us)
        times = {**busy._asdict(), "send_us": crossing}
        if self.case.schedule.splits_backward:
            times |= self._split_backward_times(busy, cuts)._asdict()
            sums = self.case.sums.gradient_allreduce_us(cuts[:, :-1], cuts[:, 1:]) if self.case.replicas > 1 else None
            return makespans(self.actions, times, blocking=self.blocking, between_steps_us=own, allreduce_us=sums)
        pipeline = makespans(self.actions, times, blocking=self.blocking)
        # The drain and fill of later stages hide the optimizer step of a device.
        return pipeline + optimizer_delay_us(own, optimizer_slack_us(busy, crossing)[:, : self.num_devices])

    def excess_bytes(self, cuts: IntArray, choices: IntArray) -> FloatArray:
        """Return the bytes by which each device exceeds its memory limit, shape (partitions, devices).

        The result is infinite if a stage of the device has more than `most_layers` layers.
        """
        stages, inside = self._bytes_of_stages(cuts, choices)
        if self._fit_in_any_order(stages, inside):
            return np.zeros((len(cuts), self.num_devices))
        known_bytes = np.where(
            inside[:, self.stages].all(axis=2), device_peaks(stages[:, self.stages], self._counts), inf
        )
        over: FloatArray = np.maximum(known_bytes - np.array(self.case.limits_bytes[: self.num_devices]), 0.0)
        return over

    def fits(self, cuts: IntArray, choices: IntArray, actions: tuple[tuple[Action, ...], ...]) -> bool:
        """Return True if a partition fits into memory with given action orders.

        Args:
            cuts: Cuts of the partition, shape (stages + 1,).
            choices: Recompute choice of each stage, shape (stages,).
            actions: Action order of each device.
        """
        stages, inside = self._bytes_of_stages(cuts[None], choices[None])
        if self._fit_in_any_order(stages, inside):
            return True
        always, allocation_bytes = stages[0, :, 0], stages[0, :, 1:]
        each = zip(self.stages, allocation_counts_at_points(actions), self.case.limits_bytes, strict=False)
        return bool(inside.all()) and all(
            always[own].sum() + (counts.reshape(len(counts), -1) @ allocation_bytes[own].ravel()).max() <= limit
            for own, counts, limit in each
        )

    def excess_bytes_by_choices(self, cuts: IntArray, devices: IntArray, combinations: IntArray) -> FloatArray:
        """Return by how many bytes a device exceeds its limit, for each partition and combination of recompute choices.

        Args:
            cuts: Cuts of each partition, shape (partitions, stages + 1).
            devices: Device to examine in each partition: a sorted array of shape (partitions,).
            combinations: Combinations of recompute choices of the device's stages, as indices into `Evaluator.allowed`;
                shape (combinations, stages per device).

        Returns:
            Bytes for each combination, shape (partitions, combinations); infinite if a stage has more than
            `most_layers` layers.
        """
        choices = np.array(self.allowed)[:, None, None]
        stages, inside = self._bytes_of_stages(cuts, choices, self.stages[devices])
        peaks = np.empty((len(cuts), len(combinations)))
        firsts = np.searchsorted(devices, np.arange(self.num_devices + 1)).tolist()
        for device, some in enumerate(starmap(slice, pairwise(firsts))):
            if some.stop > some.start:
                peaks[some] = device_peaks_by_choice(stages[:, some], combinations, self._counts[device])
        peaks[~np.all(inside[0], axis=1)] = inf
        over: FloatArray = np.maximum(peaks - np.array(self.case.limits_bytes)[devices, None], 0.0)
        return over

    def stage_bytes(self, cuts: IntArray, choices: IntArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Return permanent bytes and bytes per allocation of each stage of each partition; True where they are valid.

        Returns:
            Permanent bytes, shape (partitions, stages); bytes of each kind of allocation (`ALLOCATIONS`), shape
            (partitions, stages, kinds); and False for stages with more than `most_layers` layers or a choice outside of
            `CHOICES`, whose bytes are invalid.
        """
        stages, inside = self._bytes_of_stages(cuts, choices)
        return stages[..., 0], stages[..., 1:], inside

    def _bytes_of_stages(
        self, cuts: IntArray, choices: IntArray, which: IntArray | None = None
    ) -> tuple[FloatArray, BoolArray]:
        # Return the bytes of the stages `which` of each partition, shape (partitions, some stages); None for all
        # stages. `choices` may have more dimensions before these.
        rows = np.arange(len(cuts))[:, None]
        which = np.arange(self.num_stages)[None] if which is None else which
        first, end = cuts[rows, which], cuts[rows, which + 1]
        # Column of the stage in the tables: the last column has stages of one layer, column 0 the longest stages.
        column = first - end + self.most_layers
        inside = (column >= 0) & (choices >= 0)
        # A stage that is not in the tables counts as one layer here; callers ignore its memory.
        stages = self.stage_allocation_bytes[
            np.where(inside, choices, self.allowed[0]), end, np.where(inside, column, self.most_layers - 1)
        ]
        if self.case.costs.ties or self.case.schedule.placement == "v" or self.num_devices == 1:
            # A device stores parameters that its chunks share once, and also a tensor that one chunk passes to another.
            shared = shared_bytes(self.case.costs, cuts, self.num_devices, self.case.schedule.placement)
            shared = SharedBytes(*(size[rows, which] for size in shared))
            some = np.flatnonzero(np.any(shared, axis=(0, 1)))
            less = SharedBytes(*(size[:, some] for size in shared))
            always, allocation_bytes = stages[..., some, 0], stages[..., some, 1:]
            always, allocation_bytes = subtract_shared(always, allocation_bytes, less, exact=self.case.costs.exact)
            stages[..., some, 0], stages[..., some, 1:] = always, allocation_bytes
        return stages, inside

    def _fit_in_any_order(self, stages: FloatArray, inside: BoolArray) -> bool:
        # Return True if all partitions fit, even if all micro-batches were in flight on every stage. This check is much
        # faster than counting allocations at every point in the step.
        most = [1 if name in RUNNING else max(2, self.case.micro_batches) for name in ALLOCATIONS]
        most_bytes = (stages @ np.array([1.0, *most]))[:, self.stages].sum(axis=2)
        return bool(inside.all() and (most_bytes <= self.case.limits_bytes[: self.num_devices]).all())

    def bytes_at_point(self, allocation_counts: FloatArray) -> FloatArray:
        """Return the bytes of every possible stage at one point in the step.

        The result has shape (recompute choices, layers + 1, w), where w is the largest number of layers of a stage.
        Entry [choice, end, w - n] is for the stage of the n layers before layer `end`; it is infinite if n > end.
        `allocation_counts` has the number of allocations of each kind (`ALLOCATIONS`) at this point.
        """
        return _sum_allocations(self.stage_allocation_bytes, allocation_counts)

    def memory_bounds_by_layers(self, allocation_counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return memory of stages without recomputation, and the most bytes that recomputing each layer frees.

        Both are for one point in the step. The memory of a stage minus the bytes freed by its recomputed layers is a
        lower bound of the stage's memory with this recomputation. `allocation_counts` has the number of allocations of
        each kind (`ALLOCATIONS`) at this point.

        Returns:
            Bytes of every stage without recomputation, as entries [end, most_layers - n] for the n layers before layer
            `end`; and, for each layer, the most bytes that its recomputation frees.
        """
        costs, every = self.case.costs, self._any_by_layers
        runs = bool((every.peak[allocation_counts > 0] >= 0).any())
        # While a layer runs, memory saved by other layers adds to its peak: saving a byte less also lowers the peak.
        times = float(allocation_counts @ every.saved) + runs * costs.exact
        least = _sum_allocations(self._allocation_bytes_by_layers, allocation_counts)
        return least, times * most_bytes_freed(costs)[0]

    def _times(
        self, cuts: IntArray, choices: IntArray, recomputed_layers_us: FloatArray | None = None
    ) -> tuple[StageBusyTimes, FloatArray, FloatArray]:
        sums, first, end = self.case.sums, cuts[:, :-1], cuts[:, 1:]
        recompute_us = 0.0 if recomputed_layers_us is None else recomputed_layers_us
        busy = sums.busy_times(first, end, choices, speed=self.speeds, recomputed_layers_us=recompute_us)
        own = sums.between_steps_us(first, end, self.speeds)[:, self.stages].sum(axis=2)
        return busy, self.transfer_us[np.arange(self.num_stages), end], own

    def _split_backward_times(self, busy: StageBusyTimes, cuts: IntArray) -> SplitBackwardTimes:
        return self.case.sums.split_backward_times(busy, cuts[:, :-1], cuts[:, 1:], speed=self.speeds)

    @cached_property
    def peak_allocation_counts(self) -> list[FloatArray]:
        """For each device, numbers of allocations at the points in the step where its memory may peak.

        Each array has the shape (points, stages per device, kinds of allocations in `ALLOCATIONS`).
        """
        return [counts.astype(np.float64) for counts in peak_allocation_counts(self.actions)]

    @cached_property
    def _counts(self) -> FloatArray:
        return stack_device_counts(self.peak_allocation_counts)

    @cached_property
    def stage_allocation_bytes(self) -> FloatArray:
        """Bytes of every possible stage, shape (choices, layers + 1, most_layers, 1 + kinds of allocations).

        Entry [choice, end, most_layers - n] is for the stage of the n layers before layer `end`. It has the permanent
        bytes, then those of one allocation of each kind (`ALLOCATIONS`).
        """
        allocation_bytes = np.zeros(
            (len(CHOICES), self.case.costs.num_layers + 1, self.most_layers, 1 + len(ALLOCATIONS))
        )
        allocation_bytes[self.allowed] = np.inf

        def block(firsts: IntArray, stop: int) -> list[FloatArray]:
            stages = self._stages_in(firsts, stop)
            return [table for choice in self.allowed for table in allocation_bytes_of_stages(stages, CHOICES[choice])]

        fill_stage_tables(
            [table for choice in self.allowed for table in np.moveaxis(allocation_bytes[choice], -1, 0)], block
        )
        return allocation_bytes

    @cached_property
    def _allocation_bytes_by_layers(self) -> FloatArray:
        # As `stage_allocation_bytes`, for the recompute choice `layers` without any recomputed layer; the axis of
        # choices is missing.
        allocation_bytes = np.full((self.case.costs.num_layers + 1, self.most_layers, 1 + len(ALLOCATIONS)), np.inf)

        def block(firsts: IntArray, stop: int) -> list[FloatArray]:
            saved, levels = saved_and_peaks_without_recomputation(self.case.costs, firsts, slice(int(firsts[0]), stop))
            stages = with_recomputed_layers(self._stages_in(firsts, stop), SavedAndPeaks(saved, *levels))
            return list(allocation_bytes_of_stages(stages, "layers"))

        fill_stage_tables(list(np.moveaxis(allocation_bytes, -1, 0)), block)
        return allocation_bytes

    def _stages_in(self, firsts: IntArray, stop: int) -> StageMemoryTable:
        case, layers = self.case, slice(int(firsts[0]), stop)
        splits = case.schedule.splits_backward
        return stage_memory_table(case.costs, firsts, layers, micro_batches=case.micro_batches, splits_backward=splits)

    @cached_property
    def _any_by_layers(self) -> ChunkMemoryFunction:
        # Only the fields `saved` and `peak` are read, which are equal for all stages.
        case = self.case
        return chunk_memory_function(
            case.costs,
            0,
            case.costs.num_layers,
            micro_batches=case.micro_batches,
            splits_backward=case.schedule.splits_backward,
        )


def _sum_allocations(allocation_bytes: FloatArray, counts: FloatArray) -> FloatArray:
    with np.errstate(invalid="ignore"):
        held = allocation_bytes[..., 0] + allocation_bytes[..., 1:] @ counts
    known: FloatArray = np.where(np.isnan(held), np.inf, held)
    return known


def move_one_cut(cuts: IntArray) -> IntArray:
    """Return the partitions in which one of the cuts is moved by 1, 2 or 4 layers in either direction."""
    places = [(k, cuts[k] + step) for k in range(1, len(cuts) - 1) for step in _STEPS]
    every = [(*cuts[:k], cut, *cuts[k + 1 :]) for k, cut in places if cuts[k - 1] < cut < cuts[k + 1]]
    return np.array(every, dtype=np.int64).reshape(len(every), len(cuts))
