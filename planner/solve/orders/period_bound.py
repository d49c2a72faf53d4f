"""Lower bounds of the step time that hold for every action order, of one partition or of all partitions.

    f       first stage of a device along the chain; the device's first action is a forward of f
    F, G    forward time of a stage; least time of a stage to compute its input gradient
    P       least time from the start of a forward of f to the end of the input gradient of the same micro-batch
    a       least time from the start of the device's first action until it can run anything but forwards of f
    n       largest number of micro-batches in flight on f that the device's memory allows
    span    time from a device's first action to the end of its last action

A device computes all of its work. During the time a, it runs at most n forwards of f, and is idle otherwise:

    span >= work + max(0, a - n F)

Each of the M micro-batches is in flight on f for at least P, and at most n are in flight at once. The micro-batches can
therefore be put into n slots, so that those in one slot are in flight one after the other. Some slot has at least
ceil(M / n) micro-batches:

    span >= ceil(M / n) P + rest of a backward of f after its input gradient

Let g, h, … be stages after f, all on one other device. Between the first forward and the last backward of f, this
device runs all forwards and input gradients of g, h, …. So the span of f's device has another bound:

    span >= t + M (sum of F + G over g, h, …) + b + last backward of f

    t       time of one micro-batch to g: forwards of f and of the stages before g, and their transfers
    b       time of one micro-batch from g back to f: input gradients of the stages between, and transfers

These bounds hold for any order of micro-batches, and for split and whole backwards. A device's span, all-reduces and
optimizer step together are a lower bound of the step time of a partition.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import inf

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.peak_points import ALLOCATIONS, BACKWARDS, FORWARDS, INPUT_BACKWARDS
from planner.core.cost.stage_time import SplitBackwardTimes, StageBusyTimes
from planner.solve.chunks.search import all_cuts
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator

_MOST_CUTS = 100_000
"""Largest number of partitions whose bounds are computed one by one: some tenths of a second."""

_CELLS = 4
"""Number of stages whose bound takes as long to compute as one simulated action."""

_MOST_COMBINATIONS = 27
"""Largest number of combinations of recomputation choices for a device's chunks that are tried."""

_ROUNDED_BYTES = 64.0
"""Tolerance in bytes, because the exact memory model rounds every component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeBounds:
    """Lower bounds of stage times, in microseconds; every array has shape (partitions, stages)."""

    forward_us: FloatArray
    gradient_us: FloatArray
    """Shortest time to compute the input gradient of a micro-batch."""
    backward_us: FloatArray
    """Shortest time of a whole or split backward of a micro-batch."""
    work_us: FloatArray
    """Sum of the forwards and backwards of all micro-batches."""
    send_us: FloatArray
    """Time of one transfer to the next stage."""

    @classmethod
    def of(
        cls, busy: StageBusyTimes, split_backward: SplitBackwardTimes, send_us: FloatArray, micro_batches: int
    ) -> "StageTimeBounds":
        """Return lower bounds of the times of stages, with whole or split backwards.

        Args:
            busy: Times of forwards and whole backwards, shape (partitions, stages).
            split_backward: Times of split backwards, shape (partitions, stages).
            send_us: Times of one transfer to the next stage, shape (partitions, stages).
            micro_batches: Number of micro-batches.
        """
        backward = np.minimum(busy.backward_us, split_backward.input_backward_us + split_backward.weight_backward_us)
        last = np.minimum(
            busy.last_backward_us, split_backward.last_input_backward_us + split_backward.weight_backward_us
        )
        whole = np.minimum(busy.backward_us, busy.last_backward_us)
        return cls(
            forward_us=busy.forward_us,
            gradient_us=np.minimum(
                whole, np.minimum(split_backward.input_backward_us, split_backward.last_input_backward_us)
            ),
            backward_us=np.minimum(backward, last),
            work_us=micro_batches * busy.forward_us + (micro_batches - 1) * backward + last,
            send_us=send_us,
        )


def least_device_spans_us(
    times: StageTimeBounds,
    chunks: Sequence[Sequence[int]],
    micro_batches: int,
    most_in_flight: FloatArray,
    *,
    later_gradient_us: FloatArray | None = None,
) -> FloatArray:
    """Return lower bounds of each device's time from its first to its last action in a step, for any action order.

    Args:
        times: Least times of the stages.
        chunks: Indices of the stages of each device, ascending.
        micro_batches: Number of micro-batches.
        most_in_flight: Largest number of micro-batches in flight on each device's first stage, at least 1; shape
            (partitions, devices).
        later_gradient_us: Input-gradient times to use for all stages after a device's first stage, shape (partitions,
            stages). None to use `times.gradient_us`.

    Returns:
        Lower bounds in microseconds, shape (partitions, devices).
    """
    device_of = {stage: device for device, stages in enumerate(chunks) for stage in stages}
    crosses = [device_of[s] != device_of[s + 1] for s in range(len(device_of) - 1)]
    sends = times.send_us * np.array([*crosses, False])
    # Sums over the stages before each stage, including the transfers of these stages.
    forth = _prefix_sums(times.forward_us + sends)
    later_gradient_us = times.gradient_us if later_gradient_us is None else later_gradient_us
    back = _prefix_sums(later_gradient_us + sends)
    spans = np.zeros(most_in_flight.shape)
    for device, stages in enumerate(chunks):
        first, n = stages[0], most_in_flight[:, device]
        gradient_us = times.gradient_us[:, first]
        # Time from the end of a forward of f until the gradient of its output arrives.
        away_us = forth[:, -1] - forth[:, first + 1] + back[:, -1] - back[:, first + 1] + 2 * sends[:, first]
        trip_us = times.forward_us[:, first] + away_us + gradient_us
        # If the device has other stages, a micro-batch reaches them before its gradient arrives at f.
        arrival_us = trip_us - gradient_us if len(stages) == 1 else forth[:, stages[1]] - forth[:, first]
        idle_us = np.maximum(0.0, arrival_us - n * times.forward_us[:, first])
        trips_us = np.ceil(micro_batches / n) * trip_us - gradient_us + times.backward_us[:, first]
        least_us = np.maximum(times.work_us[:, list(stages)].sum(axis=1) + idle_us, trips_us)
        for other_stages in chunks:
            later = [s for s in other_stages if s > first]
            if later:
                # Time from f to g and back, without the forwards and gradients of g, which `all_us` includes.
                way_us = forth[:, later[0]] - forth[:, first] + sends[:, first]
                way_us = way_us + back[:, later[0]] - back[:, first + 1]
                all_us = micro_batches * (times.forward_us + later_gradient_us)[:, later].sum(axis=1)
                least_us = np.maximum(least_us, way_us + all_us + times.backward_us[:, first])
        spans[:, device] = least_us
    return spans


def least_round_trip_us(case: Case) -> float:
    """Return the time of one micro-batch to the last stage and back: a lower bound of all step times."""
    gradient_us = np.minimum(case.costs.backward_us, case.costs.split_backward.input_us)
    return float((case.costs.forward_us + gradient_us).sum()) / case.highest_speed


def lower_bound_of_all_cuts_us(evaluator: Evaluator, upper_us: float, most_actions: int) -> float:
    """Return a lower bound of the step time of all partitions under any action order, in microseconds.

    The bound is at most `upper_us`. It is 0 if its computation would take too long.

    Args:
        evaluator: Evaluator for a number of devices.
        upper_us: Known step time; the bound need not be larger.
        most_actions: Limit on the computing time, as the number of actions that can be simulated in this time.
    """
    num_partitions = evaluator.num_partitions
    if num_partitions > _MOST_CUTS or num_partitions * evaluator.num_stages > _CELLS * most_actions:
        return 0.0
    least_us = upper_us
    for cuts in all_cuts(evaluator):
        least_us = _least_us(evaluator, cuts, least_us)
    return least_us


def _least_us(evaluator: Evaluator, cuts: IntArray, upper_us: float) -> float:
    fastest, between_steps_us = _least_times(evaluator, cuts, evaluator.allowed[0])
    work_us = fastest.work_us[:, evaluator.stages].sum(axis=2) + between_steps_us
    # Most cuts are so uneven that their work alone exceeds `upper_us`.
    cuts = cuts[work_us.max(axis=1) < upper_us]
    if not len(cuts):
        return upper_us
    stages = [_StageBounds.of(evaluator, cuts, choice) for choice in evaluator.allowed]
    gradient_us = stages[0].times.gradient_us
    spans = np.full((len(cuts), evaluator.num_devices), inf)
    for stage_bounds in _combinations(evaluator, stages):
        most_in_flight = stage_bounds.most_in_flight(evaluator)
        chunks, num = evaluator.stages_by_device, evaluator.case.micro_batches
        most = np.maximum(most_in_flight, 1.0)
        least = least_device_spans_us(stage_bounds.times, chunks, num, most, later_gradient_us=gradient_us)
        spans = np.minimum(spans, np.where(most_in_flight > 0, least, inf))
    return min(upper_us, float((spans + stages[0].between_steps_us).max(axis=1).min()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageBounds:
    """Lower bounds of the times and memory of stages; memory in bytes, shape (partitions, stages)."""

    times: StageTimeBounds
    between_steps_us: FloatArray
    """All-reduce and optimizer time of each device, in microseconds; shape (partitions, devices)."""
    always: FloatArray
    held: FloatArray
    """Memory of a micro-batch between its forward and its backward."""
    running: FloatArray
    """Memory of a running forward or backward, whichever is larger."""
    inside: FloatArray
    """1 if the memory of the stage is known; 0 if the stage is too long for the tables of `Evaluator`."""

    @classmethod
    def of(cls, evaluator: Evaluator, cuts: IntArray, choice: int) -> "_StageBounds":
        always, allocation_bytes, inside = evaluator.stage_bytes(
            cuts, np.full((len(cuts), evaluator.num_stages), choice)
        )
        size = {name: allocation_bytes[..., place] for place, name in enumerate(ALLOCATIONS)}
        held, forward, backward = (
            np.min([size[name] for name in names], axis=0)
            for names in (("held", "kept"), FORWARDS, (*BACKWARDS, *INPUT_BACKWARDS))
        )
        times, between_steps_us = _least_times(evaluator, cuts, choice)
        return cls(
            times=times,
            between_steps_us=between_steps_us,
            always=always,
            held=held,
            running=np.maximum(forward, backward),
            inside=inside.astype(float),
        )

    def most_in_flight(self, evaluator: Evaluator) -> FloatArray:
        num = float(evaluator.case.micro_batches)
        most = np.full((len(self.always), evaluator.num_devices), num)
        for device, stages in enumerate(evaluator.stages_by_device):
            columns = list(stages)
            # Gradients, and tensors kept for deferred W, are not counted, because they need not exist.
            room = evaluator.case.limits_bytes[device] + _ROUNDED_BYTES - self.always[:, columns].sum(axis=1)
            # While a micro-batch runs on a later chunk, earlier chunks of the device keep its activations.
            held_before = _prefix_sums(self.held[:, columns])[:, :-1]
            fits = (held_before + self.running[:, columns] <= room[:, None]).all(axis=1)
            waiting = np.floor((room - self.running[:, stages[0]]) / np.maximum(self.held[:, stages[0]], 1e-9)) + 1
            is_known = self.inside[:, columns].all(axis=1)
            most[:, device] = np.where(is_known, np.where(fits, np.minimum(waiting, num), 0.0), num)
        return most


def _combinations(evaluator: Evaluator, stages: Sequence[_StageBounds]) -> Iterator[_StageBounds]:
    num_chunks = evaluator.case.chunks
    place = {stage: chunk for chunks in evaluator.stages_by_device for chunk, stage in enumerate(chunks)}

    def by_chunk(each: Sequence[FloatArray]) -> FloatArray:
        return np.stack([each[place[s]][:, s] for s in range(evaluator.num_stages)], axis=1)

    if len(stages) ** num_chunks <= _MOST_COMBINATIONS:
        combinations = product(stages, repeat=num_chunks)
    else:
        # Only the choice of the first chunk varies; other chunks have the smallest bounds over all choices.
        free = _combine(stages, lambda each: np.min(each, axis=0))
        combinations = product(stages, *[[free]] * (num_chunks - 1))
    for stage_bounds in combinations:
        yield _combine(stage_bounds, by_chunk)


def _combine(stages: Sequence[_StageBounds], merge: Callable[[Sequence[FloatArray]], FloatArray]) -> _StageBounds:
    times = {of.name: merge([getattr(each.times, of.name) for each in stages]) for of in fields(StageTimeBounds)}
    sizes = {name: merge([getattr(each, name) for each in stages]) for name in ("always", "held", "running", "inside")}
    return _StageBounds(times=StageTimeBounds(**times), between_steps_us=stages[0].between_steps_us, **sizes)


def _least_times(evaluator: Evaluator, cuts: IntArray, choice: int) -> tuple[StageTimeBounds, FloatArray]:
    choices = np.full((len(cuts), evaluator.num_stages), choice)
    busy, split_backward, crossing, between_steps_us = evaluator.durations(cuts, choices)
    times = StageTimeBounds.of(busy, split_backward, crossing, evaluator.case.micro_batches)
    if evaluator.case.replicas > 1:
        # Only the all-reduce of one chunk must come after the last action, so count the smallest.
        sums = evaluator.case.sums.gradient_allreduce_us(cuts[:, :-1], cuts[:, 1:])[:, evaluator.stages]
        between_steps_us = between_steps_us - (sums.sum(axis=2) - sums.min(axis=2))
    return times, between_steps_us


def _prefix_sums(times_us: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((len(times_us), 1)), np.cumsum(times_us, axis=1)], axis=1)
