"""States of the dynamic program over cuts, from which the step times of plans are computed.

The dynamic program adds stages from the last to the first. A partial plan has stages for the layers i..L-1. Its state
is a few values; a smaller value is never worse. The recurrence of a schedule computes the state after a previous stage
is added, and bounds the step time of every complete plan that contains the partial plan:

    layers    0 ........ h-1 | h ...... i-1 | i ................ L-1
            earlier layers   |    stage     |  partial plan: state
              lower bounds   |  F  B  q  U  |
                             |______________|  extend -> partial plan of layers h..L-1

The rules are those of docs/cost-model.md, which uses other letters for some of these values:

    M, K, k     number of micro-batches, number of stages, index of the added stage
    F, B, q     time of the added stage: forward; backward of micro-batches 0..M-2; backward of micro-batch M-1
    R           recomputation of micro-batch M-1, part of q
    C           time of one transfer to the next stage
    U           all-reduce and optimizer step of the stage
    w           micro-batches in flight, min(M, K-k) under 1F1B

**GPipe** (exact, `planner.core.cost.step_time`):

    T = (M-1) f + d + u         for a plan of all layers: M-1 forwards of the slowest stage or link, then
                                  micro-batch M-1 through all stages

    f   largest forward time of a stage or link in the partial plan
    x   largest backward time of a stage or link for micro-batches 0..M-2
    a   time of one of these micro-batches through all stages and links, forward and backward, without waiting
    d   time of micro-batch M-1 through all stages and links, with waiting in the backward only
    u   time that the optimizer steps add to the step

An added stage changes f, x and a by its F and B. Between its last backward and its next step, a stage runs its
optimizer step. Later stages have F + q - R + 2 C more time for it than the added stage: their last backward ends C + q
- R earlier (without R, which the added stage runs before the gradient arrives), and their next step begins F + C later.
So u becomes max(U, u - (F + q - R + 2 C)). The new d is q plus the larger of

    d + F               micro-batch M-1 arrives at the added stage
    a + (M-2) x         the added stage has finished the other micro-batches, if M > 1; with the new a and x

The link after the stage is added first. It changes f, x, a and d like a stage with F = B = q = C.

**1F1B** (a lower bound: the makespan is the longest of many paths, and only the most important paths are computed):

    g   time from the first forward to the last backward of the partial plan's first stage
    s   round trip of the first micro-batch: time from its forward to the end of its backward on the same stage
    r   round trip of the last micro-batch
    u   time that the optimizer steps add to the step, as under GPipe

An added stage changes s to s' = s + 2 C + F + B, and r to r' = r + 2 C + F + q. It changes g to the largest of

    M F + (M-1) B + q                       all work of the added stage
    F + 2 C + s + (M-1) B + q + (M-w) F     first forward of the added stage, and round trip of the first micro-batch
                                              through the later stages; then all backwards of the added stage, and the
                                              M-w forwards that it runs after its first backward
    floor((M-1) / w) s' + r'                consecutive round trips, because micro-batch m begins only after
                                              micro-batch m-w has returned
    g + F + q + 2 C                         first forward of the added stage, a transfer, time g of the next stage, a
                                              transfer, last backward of the added stage
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray
from planner.core.cost.stage_time import delay_with_added_stage_us
from planner.solve.space.prefixes import BoundedQuantity
from planner.solve.space.problem import Bottlenecks, StageTimeArrays

PlanStates = tuple[FloatArray, ...]
"""States of partial plans: one array per value, such as the longest forward time, with one entry per plan."""
_Passed = tuple[FloatArray, FloatArray, FloatArray]
"""Values x, a and d of partial plans under GPipe (see the module's docstring), in microseconds."""
_Machine = tuple[FloatArray, FloatArray, FloatArray]
"""Times of a machine (stage or link): forward F; backward p of micro-batches 0..M-2; backward q of micro-batch M-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierLayerBounds:
    """Lower bounds for the layers before a partial plan. Arrays have one entry per partial plan."""

    work_us: FloatArray
    """Forward plus backward time of the layers before the partial plan, in microseconds."""
    between_steps_us: float
    """Lower bound of the all-reduce and optimizer time of a plan's first stage, in microseconds."""
    exist: BoolArray
    """True for partial plans that do not begin at layer 0."""
    least: dict[str, FloatArray]
    """Lower bounds of each quantity, by name. A quantity is, for example, the longest forward time of a stage."""


_NEEDS: dict[str, BoundedQuantity] = {
    "forward": BoundedQuantity(np.maximum, lambda stages: stages.forward),
    "backward": BoundedQuantity(np.maximum, lambda stages: stages.backward),
    "peak": BoundedQuantity(
        np.maximum, lambda stages: np.where(np.isfinite(stages.forward), stages.peak_bytes, np.inf)
    ),
    "moved": BoundedQuantity(np.add, lambda stages: np.where(np.isfinite(stages.forward), stages.sent_bytes, np.inf)),
    "squares": BoundedQuantity(np.add, lambda stages: (stages.forward + stages.backward) ** 2),
}


def _needs(*names: str) -> dict[str, BoundedQuantity]:
    return {name: _NEEDS[name] for name in names}


class Recurrence(Protocol):
    """Recurrence of the dynamic program over cuts for one schedule."""

    size: int
    """Number of values in a state."""
    rank_is_time: bool
    """True if partitions are ranked by their step time alone."""
    needs: dict[str, BoundedQuantity]
    """Definitions of the lower bounds that the recurrence uses, by name."""

    def extend(self, states: PlanStates, stages: StageTimeArrays, num_later: int) -> PlanStates:
        """Return the states of partial plans after one stage is added at the beginning of each plan.

        Args:
            states: States before this addition.
            stages: Stage to add to each partial plan.
            num_later: Number of stages of each partial plan before this addition.
        """

    def raise_to_lower_bounds(self, states: PlanStates, earlier: EarlierLayerBounds) -> PlanStates:
        """Return the states, with each value raised to its lower bound in complete plans.

        For example, the longest forward time is raised to a lower bound of the longest forward time of complete plans.
        Raised values are more often equal, so the search can drop more partial plans as dominated.

        Args:
            states: States of the partial plans.
            earlier: Lower bounds for the layers before the partial plans.
        """

    def bound_us(self, states: PlanStates, earlier: EarlierLayerBounds) -> FloatArray:
        """Return, for each partial plan, a lower bound of the step time of complete plans that contain it."""

    def ranking_bounds(self, states: PlanStates, earlier: EarlierLayerBounds, bound_us: FloatArray) -> PlanStates:
        """Return, for each partial plan, lower bounds of `ChainCuts.sort_key` of complete plans that contain it.

        Args:
            states: States of the partial plans.
            earlier: Lower bounds for the layers before the partial plans.
            bound_us: Result of the method `bound_us`.
        """


class GPipeRecurrence:
    """Recurrence of the dynamic program over cuts that computes exact step times under GPipe.

    Args:
        micro_batches: Number of micro-batches.
        floor: Lower bounds of the largest forward and the largest backward time of every plan, or None.
    """

    size = 5
    rank_is_time = True

    def __init__(self, micro_batches: int, floor: Bottlenecks | None = None) -> None:
        self._M = micro_batches
        self._floor = floor

        def passes(stages: StageTimeArrays) -> FloatArray:
            backward = stages.backward if micro_batches > 1 else stages.last_backward
            return stages.forward + backward + 2 * stages.link

        # The sum comes first: it is infinite where first layers cannot be reached.
        self.needs = {"passes": BoundedQuantity(np.add, passes), **({} if floor else _needs("forward", "backward"))}

    def _least_bottlenecks(self, earlier: EarlierLayerBounds) -> tuple[FloatArray | float, FloatArray | float]:
        return self._floor or (earlier.least["forward"], earlier.least["backward"])

    def extend(self, states: PlanStates, stages: StageTimeArrays, num_later: int) -> PlanStates:  # noqa: ARG002 - GPipe's stages are all alike
        # The link to the next stage and the stage are machines of a flow shop.
        f, x, a, d, u = states
        F, C = stages.forward, stages.link
        x, a, d = self._add_machine((x, a, d), (C, C, C))
        x, a, d = self._add_machine((x, a, d), (F, stages.backward, stages.last_backward))
        return (
            np.maximum(np.maximum(f, C), F),
            x,
            a,
            d,
            delay_with_added_stage_us(u, stages.between_steps_us, stages.slack_us),
        )

    def _add_machine(self, states: _Passed, machine: _Machine) -> _Passed:
        (x, a, d), (F, p, q) = states, machine
        # A single flow shop models both directions, because forward times only add up.
        x, a, d = np.maximum(x, p), a + F + p, d + F
        # The last micro-batch continues at once, or waits until the slowest machine has finished the others.
        if self._M > 1:
            d = np.maximum(d, a + (self._M - 2) * x)
        return x, a, d + q

    def raise_to_lower_bounds(self, states: PlanStates, earlier: EarlierLayerBounds) -> PlanStates:
        f, x, a, d, u = states
        forward, backward = self._least_bottlenecks(earlier)
        f, x = np.maximum(f, forward), np.maximum(x, backward)
        return f, x, a, d, _raised_tail(u, earlier)

    def bound_us(self, states: PlanStates, earlier: EarlierLayerBounds) -> FloatArray:
        f, x, a, d, u = states
        forward, backward = self._least_bottlenecks(earlier)
        f, x = np.maximum(f, forward), np.maximum(x, backward)
        if self._M == 1:
            d = d + earlier.least["passes"]
        else:
            # The last micro-batch follows the others through the slowest earlier stage.
            d = d if self._floor else np.maximum(d, a + (self._M - 1) * backward)
            # Or the last micro-batch waits for the recomputation of the others in all earlier stages.
            d = np.maximum(d + earlier.work_us, a + earlier.least["passes"] + _times(self._M - 2, x))
        return d + _times(self._M - 1, f) + np.where(earlier.exist, earlier.between_steps_us, u)

    def ranking_bounds(self, states: PlanStates, earlier: EarlierLayerBounds, bound_us: FloatArray) -> PlanStates:  # noqa: ARG002 - time is all
        return (bound_us,)


class OneForwardOneBackwardRecurrence:
    """Recurrence of the dynamic program over cuts that computes lower bounds of step times under 1F1B."""

    size = 4
    rank_is_time = True

    def __init__(self, micro_batches: int) -> None:
        self._M = micro_batches

        def work(stages: StageTimeArrays) -> FloatArray:
            backward = _times(micro_batches - 1, stages.backward) + stages.last_backward
            return micro_batches * stages.forward + backward

        self.needs = {**_needs("backward"), "work": BoundedQuantity(np.maximum, work)}

    def extend(self, states: PlanStates, stages: StageTimeArrays, num_later: int) -> PlanStates:
        # The new g is the longest of the four paths in the module's docstring.
        g, s, r, u = states
        M, w = self._M, min(self._M, num_later + 1)
        F, C, q = stages.forward, stages.link, stages.last_backward
        # A single micro-batch is the last one.
        B = stages.backward if M > 1 else q
        # The device computes all of its own work.
        work = M * F + (M - 1) * B + q
        s = s + 2 * C
        # After the first micro-batch come the backwards of the others, and the forwards that waited for it.
        first_back = F + s + (M - 1) * B + q + (M - w) * F
        s = s + F + B
        r = r + 2 * C + F + q
        # A micro-batch begins only after the w-th previous one has returned, so round trips are consecutive.
        trips = (M - 1) // w * s + r
        # The slowest later stage also bounds it, plus one forward, one backward and two transfers.
        g = np.maximum(np.maximum(work, first_back), np.maximum(trips, g + (F + q + 2 * C)))
        return g, s, r, delay_with_added_stage_us(u, stages.between_steps_us, stages.slack_us)

    def raise_to_lower_bounds(self, states: PlanStates, earlier: EarlierLayerBounds) -> PlanStates:
        # Every difference in g, s and r changes the step time, so only u is raised.
        g, s, r, u = states
        return g, s, r, _raised_tail(u, earlier)

    def bound_us(self, states: PlanStates, earlier: EarlierLayerBounds) -> FloatArray:
        # The longest of three paths: g plus earlier work; all work of an earlier stage; a round trip.
        g, s, _, u = states
        bound: FloatArray = np.maximum(
            np.maximum(g + earlier.work_us, earlier.least["work"]),
            s + earlier.work_us + _times(self._M - 1, earlier.least["backward"]),
        )
        return bound + np.where(earlier.exist, earlier.between_steps_us, u)

    def ranking_bounds(self, states: PlanStates, earlier: EarlierLayerBounds, bound_us: FloatArray) -> PlanStates:  # noqa: ARG002 - time is all
        return (bound_us,)


def _times(count: int, time: FloatArray) -> FloatArray:
    # Keep infinity, which means that nothing fits, if the count is 0.
    return count * time if count else np.where(np.isinf(time), np.inf, 0.0)


def _raised_tail(tail: FloatArray, earlier: EarlierLayerBounds) -> FloatArray:
    # The work of earlier layers hides that much of an optimizer step. The first stage always adds its own step.
    return np.where(earlier.exist, np.maximum(tail, earlier.between_steps_us + earlier.work_us), tail)


class TieBreakRecurrence:
    """Recurrence that ranks equally fast partitions by memory, transferred bytes or balance.

    Args:
        recurrence: Recurrence for the step time.
        ranks: Criteria, the most important first: `peak`, the highest peak memory; `moved`, bytes sent across cuts;
            `squares`, the sum of squared stage times, which is smallest for equal stages.
    """

    rank_is_time = False

    def __init__(self, recurrence: Recurrence, *ranks: str) -> None:
        self._recurrence = recurrence
        self._ranks = _needs(*ranks)
        self.size = recurrence.size + len(ranks)
        self.needs = {**recurrence.needs, **self._ranks}

    def _ranked(self, states: PlanStates) -> Iterator[tuple[str, BoundedQuantity, FloatArray]]:
        for (name, need), number in zip(self._ranks.items(), states[self._recurrence.size :], strict=True):
            yield name, need, number

    def extend(self, states: PlanStates, stages: StageTimeArrays, num_later: int) -> PlanStates:
        more = [need.combine(number, need.stage_values(stages)) for _, need, number in self._ranked(states)]
        return *self._recurrence.extend(states[: self._recurrence.size], stages, num_later), *more

    def raise_to_lower_bounds(self, states: PlanStates, earlier: EarlierLayerBounds) -> PlanStates:
        # Only maxima are raised; sums stay as they are.
        more = [
            np.maximum(number, earlier.least[name]) if need.combine is np.maximum else number
            for name, need, number in self._ranked(states)
        ]
        return *self._recurrence.raise_to_lower_bounds(states[: self._recurrence.size], earlier), *more

    def bound_us(self, states: PlanStates, earlier: EarlierLayerBounds) -> FloatArray:
        return self._recurrence.bound_us(states[: self._recurrence.size], earlier)

    def ranking_bounds(self, states: PlanStates, earlier: EarlierLayerBounds, bound_us: FloatArray) -> PlanStates:  # noqa: ARG002 - time is equal
        return tuple(need.combine(number, earlier.least[name]) for name, need, number in self._ranked(states))
