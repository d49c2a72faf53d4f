"""Below the time from step to step with any lists of actions: what no order can beat, for some cuts or for all.

    f     a device's first stage along the chain; its first action is a forward there, for all else comes later
    F, G  a stage's forward, and what it takes at least until the gradient of its input is there
    P     from the begin of a forward on f to the end of the same micro-batch's backward there: all stages behind
    a     from the begin of the first forward on f until anything else arrives: a forward on the device's next stage,
          or, where f is its only one, a gradient
    n     micro-batches that the device's memory lets wait on f at most

    A device computes all of its work. Until `a` it can only run forwards of f, n of them at most; the rest it idles:

        window >= work + max(0, a - n F)

    Each of M micro-batches is between its forward and its backward on f for P at least, n of them at a time. With a
    color for each place in memory, intervals of one color come one after the other, and some color has M/n of them:

        window >= ceil(M / n) P + what follows the last gradient

The last gradient of f waits for all of another device's stages g, h, … behind f: their forwards and gradients run
between the first forward on g, which is the first of these along the chain, and the last gradient there.

    window >= F's from f to g + M (F + G of g, h, …) + G's from g back to f + what follows the last gradient

No order of micro-batches is assumed, neither halves nor whole backwards. The bound of a partition is the longest of its
devices' windows with what follows them, that of all cuts the least of these.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import comb, inf

import numpy as np

from planner.core.cost.moments import BACKWARDS, FORWARDS, INPUT_BACKWARDS, PARTS
from planner.core.cost.stage_time import BusyTimes, HalfTimes
from planner.solve.chunks.search import all_cuts
from planner.solve.space.arrays import FloatArray, IntArray
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator

_MOST_CUTS = 100_000
"""Partitions of which each is bounded by itself: some tenths of a second."""

_CELLS = 4
"""Stages that are bounded in the time of one action."""

_MOST_COMBINATIONS = 27
"""Ways to recompute the chunks of a device of which each is looked at."""

_ROUNDED_BYTES = 64.0
"""Parts are rounded one by one where memory is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimes:
    """What stages of N partitions take at least, in microseconds; arrays of shape (N, S)."""

    forward_us: FloatArray
    gradient_us: FloatArray
    """G."""
    last_us: FloatArray
    """The whole backward of a micro-batch, however it runs."""
    work_us: FloatArray
    """All M micro-batches, forth and back."""
    send_us: FloatArray
    """Crossing the boundary behind each stage, once."""

    @classmethod
    def of(cls, busy: BusyTimes, halves: HalfTimes, send_us: FloatArray, micro_batches: int) -> "LeastTimes":
        """From what stages are busy with each kind of action."""
        backward = np.minimum(busy.backward_us, halves.input_backward_us + halves.weight_backward_us)
        last = np.minimum(busy.last_backward_us, halves.last_input_backward_us + halves.weight_backward_us)
        whole = np.minimum(busy.backward_us, busy.last_backward_us)
        return cls(
            forward_us=busy.forward_us,
            gradient_us=np.minimum(whole, np.minimum(halves.input_backward_us, halves.last_input_backward_us)),
            last_us=np.minimum(backward, last),
            work_us=micro_batches * busy.forward_us + (micro_batches - 1) * backward + last,
            send_us=send_us,
        )


def least_windows_us(
    times: LeastTimes,
    chunks: Sequence[Sequence[int]],
    micro_batches: int,
    most_in_flight: FloatArray,
    *,
    passed_us: FloatArray | None = None,
) -> FloatArray:
    """Below the time from the first action of each device to its last, whatever the lists are.

    Args:
        times: What stages take.
        chunks: Per device its stages, in the order of the chain.
        micro_batches: M.
        most_in_flight: n of each device, 1 at least; shape (N, K).
        passed_us: G of stages that other devices wait for, where that may be less than `times` have; shape (N, S).

    Returns:
        Microseconds, of shape (N, K).
    """
    device_of = {stage: device for device, stages in enumerate(chunks) for stage in stages}
    crosses = [device_of[s] != device_of[s + 1] for s in range(len(device_of) - 1)]
    sends = times.send_us * np.array([*crosses, False])
    # Sums over the stages in front of each one, what crosses behind them included.
    forth = _prefix_sums(times.forward_us + sends)
    passed_us = times.gradient_us if passed_us is None else passed_us
    back = _prefix_sums(passed_us + sends)
    windows = np.zeros(most_in_flight.shape)
    for device, stages in enumerate(chunks):
        first, n = stages[0], most_in_flight[:, device]
        gradient_us = times.gradient_us[:, first]
        # From the end of the forward on f until its gradient comes back.
        away_us = forth[:, -1] - forth[:, first + 1] + back[:, -1] - back[:, first + 1] + 2 * sends[:, first]
        trip_us = times.forward_us[:, first] + away_us + gradient_us
        # A micro-batch passes the device's other stages before it comes back.
        arrival_us = trip_us - gradient_us if len(stages) == 1 else forth[:, stages[1]] - forth[:, first]
        idle_us = np.maximum(0.0, arrival_us - n * times.forward_us[:, first])
        trips_us = np.ceil(micro_batches / n) * trip_us - gradient_us + times.last_us[:, first]
        least_us = np.maximum(times.work_us[:, list(stages)].sum(axis=1) + idle_us, trips_us)
        for other_stages in chunks:
            later = [s for s in other_stages if s > first]
            if later:
                # There and back between f and g, but for the forwards and gradients of g, which count among all.
                way_us = forth[:, later[0]] - forth[:, first] + sends[:, first]
                way_us = way_us + back[:, later[0]] - back[:, first + 1]
                all_us = micro_batches * (times.forward_us + passed_us)[:, later].sum(axis=1)
                least_us = np.maximum(least_us, way_us + all_us + times.last_us[:, first])
        windows[:, device] = least_us
    return windows


def least_trip_us(case: Case) -> float:
    """Below the step time of every partition, with any lists: a micro-batch goes through the whole chain and back."""
    gradient_us = np.minimum(case.costs.backward_us, case.costs.halves.input_us)
    return float((case.costs.forward_us + gradient_us).sum()) / case.fastest


def least_of_all_cuts_us(evaluator: Evaluator, upper_us: float, most_actions: int) -> float:
    """Below the step time of every partition, with any lists.

    Args:
        evaluator: The partitions.
        upper_us: A step time that is there already: a bound above it is of no use.
        most_actions: It may take as long as simulating so many actions.

    Returns:
        Microseconds, `upper_us` at most; 0 where it would take too long to look at every partition.
    """
    case = evaluator.case
    num_cuts = comb(case.costs.num_layers - 1, evaluator.num_stages - 1) if case.rules.balance is None else 1
    if num_cuts > _MOST_CUTS or num_cuts * evaluator.num_stages > _CELLS * most_actions:
        return 0.0
    least_us = upper_us
    for cuts in all_cuts(evaluator):
        least_us = _least_us(evaluator, cuts, least_us)
    return least_us


def _least_us(evaluator: Evaluator, cuts: IntArray, upper_us: float) -> float:
    """The least bound of the partitions, or `upper_us`; cuts have shape (N, S+1)."""
    fastest, own_us = _least_times(evaluator, cuts, evaluator.allowed[0])
    work_us = np.stack([fastest.work_us[:, list(stages)].sum(axis=1) for stages in evaluator.chunks], axis=1) + own_us
    # Most cuts are so uneven that nothing else need be looked at.
    cuts = cuts[work_us.max(axis=1) < upper_us]
    if not len(cuts):
        return upper_us
    stages = [_StageBounds.of(evaluator, cuts, choice) for choice in evaluator.allowed]
    passed_us = stages[0].times.gradient_us
    windows = np.full((len(cuts), evaluator.num_devices), inf)
    for stage_bounds in _combinations(evaluator, stages):
        most_in_flight = stage_bounds.most_in_flight(evaluator)
        chunks, num = evaluator.chunks, evaluator.case.micro_batches
        least = least_windows_us(stage_bounds.times, chunks, num, np.maximum(most_in_flight, 1.0), passed_us=passed_us)
        windows = np.minimum(windows, np.where(most_in_flight > 0, least, inf))
    return min(upper_us, float((windows + stages[0].own_us).max(axis=1).min()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageBounds:
    """What the stages of N partitions take and hold at least; in bytes, arrays of shape (N, S)."""

    times: LeastTimes
    own_us: FloatArray
    """What follows each device's last action; shape (N, K)."""
    always: FloatArray
    held: FloatArray
    """A micro-batch between its forward and its backward."""
    running: FloatArray
    """What runs, forward or backward: the one that takes more."""
    inside: FloatArray
    """1 where memory is in the tables, else 0."""

    @classmethod
    def of(cls, evaluator: Evaluator, cuts: IntArray, choice: int) -> "_StageBounds":
        """The stages with one kind of recomputation everywhere."""
        always, parts, inside = evaluator.stage_bytes(cuts, np.full((len(cuts), evaluator.num_stages), choice))
        part = {name: parts[..., place] for place, name in enumerate(PARTS)}
        held, forward, backward = (
            np.min([part[name] for name in names], axis=0)
            for names in (("held", "kept"), FORWARDS, (*BACKWARDS, *INPUT_BACKWARDS))
        )
        times, own_us = _least_times(evaluator, cuts, choice)
        return cls(
            times=times,
            own_us=own_us,
            always=always,
            held=held,
            running=np.maximum(forward, backward),
            inside=inside.astype(float),
        )

    def most_in_flight(self, evaluator: Evaluator) -> FloatArray:
        """How many micro-batches wait on each device's first stage, n: shape (N, K); 0 where not even one gets on."""
        num = float(evaluator.case.micro_batches)
        most = np.full((len(self.always), evaluator.num_devices), num)
        for device, stages in enumerate(evaluator.chunks):
            columns = list(stages)
            # Gradients and what is put off may be there as well, but need not.
            room = evaluator.case.limits_bytes[device] + _ROUNDED_BYTES - self.always[:, columns].sum(axis=1)
            # On a later chunk a micro-batch runs while the earlier ones hold it.
            held_before = _prefix_sums(self.held[:, columns])[:, :-1]
            fits = (held_before + self.running[:, columns] <= room[:, None]).all(axis=1)
            waiting = np.floor((room - self.running[:, stages[0]]) / np.maximum(self.held[:, stages[0]], 1e-9)) + 1
            is_known = self.inside[:, columns].all(axis=1)
            most[:, device] = np.where(is_known, np.where(fits, np.minimum(waiting, num), 0.0), num)
        return most


def _combinations(evaluator: Evaluator, stages: Sequence[_StageBounds]) -> Iterator[_StageBounds]:
    """The stages with every way to recompute the chunks of a device; of many chunks those behind the first for free."""
    num_chunks = evaluator.case.chunks
    place = {stage: chunk for chunks in evaluator.chunks for chunk, stage in enumerate(chunks)}

    def by_chunk(each: Sequence[FloatArray]) -> FloatArray:
        return np.stack([each[place[s]][:, s] for s in range(evaluator.num_stages)], axis=1)

    if len(stages) ** num_chunks <= _MOST_COMBINATIONS:
        combinations = product(stages, repeat=num_chunks)
    else:
        free = _combine(stages, lambda each: np.min(each, axis=0))
        combinations = product(stages, *[[free]] * (num_chunks - 1))
    for stage_bounds in combinations:
        yield _combine(stage_bounds, by_chunk)


def _combine(stages: Sequence[_StageBounds], join: Callable[[Sequence[FloatArray]], FloatArray]) -> _StageBounds:
    """Stages that are made of several, array by array."""
    times = {of.name: join([getattr(each.times, of.name) for each in stages]) for of in fields(LeastTimes)}
    sizes = {name: join([getattr(each, name) for each in stages]) for name in ("always", "held", "running", "inside")}
    return _StageBounds(times=LeastTimes(**times), own_us=stages[0].own_us, **sizes)


def _least_times(evaluator: Evaluator, cuts: IntArray, choice: int) -> tuple[LeastTimes, FloatArray]:
    """What stages take with that recomputation, and what follows each device's last action at least, (N, K)."""
    choices = np.full((len(cuts), evaluator.num_stages), choice)
    busy, halves, crossing, own_us = evaluator.durations(cuts, choices)
    times = LeastTimes.of(busy, halves, crossing, evaluator.case.micro_batches)
    if evaluator.case.replicas > 1:
        # Of several chunks all but the last one's gradients may have been summed by then.
        sums = evaluator.case.sums.replica_sums_us(cuts[:, :-1], cuts[:, 1:])
        each = [sums[:, list(stages)] for stages in evaluator.chunks]
        own_us = own_us - np.stack([us.sum(axis=1) - us.min(axis=1) for us in each], axis=1)
    return times, own_us


def _prefix_sums(times_us: FloatArray) -> FloatArray:
    """The sum in front of every stage, and of all: shape (N, S+1)."""
    return np.concatenate([np.zeros((len(times_us), 1)), np.cumsum(times_us, axis=1)], axis=1)
