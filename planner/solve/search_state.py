"""State of searches that simulate partitions: the best partition so far, the remaining budget, and the deadline.

Only GPipe's step time has a closed form. Under other schedules it is simulated. A search computes a lower bound for all
partitions, and improves a few good ones step by step. If few partitions have a lower bound below the best step time
found, all of them are simulated, and the answer is optimal. Otherwise a gap remains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.partition import Partition
from planner.solve.answer import SAME, Answer
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator

BLOCK = 1024
"""Largest number of partitions simulated in one batch."""

_MOST_SIMULATED = 20_000
"""Largest number of partitions that a search simulates completely to prove the best one optimal."""

_MOST_ACTIONS = 2_000_000
"""Default limit on the actions that one search simulates, which takes some seconds."""

_MOST_KNOWN = 16
"""Step times are stored for later simulations only if at most this number of partitions is simulated together."""

_FEW_BLOCKS = 8
"""Largest number of batches of `BLOCK` partitions that a search with a limited budget simulates to prove optimality."""


class SimulationBudget:
    """Number of actions that a search has simulated, and its limit.

    A batch of partitions counts as one partition, because its simulation takes about as long.

    Args:
        most_actions: Limit on simulated actions; None for a default limit.
    """

    def __init__(self, most_actions: int | None) -> None:
        self.is_bounded = most_actions is not None
        """True if a limit was given."""
        self.spent = 0
        """Number of actions simulated so far."""
        self._most_actions = _MOST_ACTIONS if most_actions is None else most_actions

    @property
    def left(self) -> int:
        """Number of actions that may still be simulated; 0 or less if none."""
        return self._most_actions - self.spent

    def try_reserve(self, later_actions: int, table_actions: int) -> bool:
        """Reserve budget for tables and return True; return False if less than `later_actions` would remain.

        If no limit was given, the result is True and nothing is reserved.

        Args:
            later_actions: Number of actions to simulate later, for which budget must remain. They are not reserved.
            table_actions: Number of actions that could be simulated in the time that the tables take. If the result is
                True, this number is counted as spent.
        """
        if not self.is_bounded:
            return True
        if table_actions + later_actions > self.left:
            return False
        self.spent += table_actions
        return True

    def count(self, evaluator: Evaluator, num_partitions: int) -> None:
        """Add the actions of `num_partitions` simulated partitions to `spent`."""
        self.spent += -(-num_partitions // BLOCK) * evaluator.num_actions

    def affordable_partitions(self, evaluator: Evaluator) -> int:
        """Return how many partitions can be simulated with half of the remaining budget; at most `_MOST_SIMULATED`."""
        blocks = max(0, self.left // (2 * evaluator.num_actions))
        return min(_MOST_SIMULATED, BLOCK * (min(blocks, _FEW_BLOCKS) if self.is_bounded else blocks))


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Best partition of a search so far, with the limits of the search."""

    case: Case
    budget: SimulationBudget
    deadline: Deadline
    upper_us: float
    """Step time of the best partition; before one is found, the step time to beat."""
    best: Partition | None = None
    bound_us: float = inf
    """Lower bound of the step times of skipped partitions."""
    rest_us: float = 0.0
    """Lower bound of the step times of partitions that are not searched yet."""

    @property
    def step_to_beat_us(self) -> float:
        """Step time to beat. Partitions whose lower bound is not below this time need not be searched."""
        return min(self.upper_us, self.deadline.best_us)

    def record_skipped(self, bound_us: float) -> None:
        """Record that partitions were skipped. `bound_us` is a lower bound of their step times."""
        self.bound_us = min(self.bound_us, bound_us)

    def simulate(
        self, evaluator: Evaluator, cuts: IntArray, choices: IntArray, recomputed_layers_us: FloatArray | None = None
    ) -> FloatArray:
        """Return simulated step times of partitions in microseconds.

        Args:
            evaluator: Evaluator for the partitions' number of devices.
            cuts: Cuts of each partition, shape (partitions, stages + 1).
            choices: Recompute choice of each stage, shape (partitions, stages).
            recomputed_layers_us: Forward time of the layers that each stage recomputes, see `Evaluator.step_us`.
        """
        self.budget.count(evaluator, len(cuts))
        if recomputed_layers_us is not None or len(cuts) > _MOST_KNOWN:
            return evaluator.step_us(cuts, choices, recomputed_layers_us)
        # Local searches often simulate a few partitions again.
        known_us = evaluator.case.known_us
        keys = [row.tobytes() for row in np.concatenate([cuts, choices], axis=1)]
        new = [n for n, key in enumerate(keys) if key not in known_us]
        if new:
            step_us = evaluator.step_us(cuts[new], choices[new]).tolist()
            known_us.update(zip([keys[n] for n in new], step_us, strict=True))
        return np.array([known_us[key] for key in keys])

    def simulate_fitting(
        self,
        evaluator: Evaluator,
        cuts: IntArray,
        choices: IntArray,
        fits: BoolArray,
        *,
        known_us: FloatArray | None = None,
    ) -> FloatArray:
        """Simulate the partitions that fit into memory, and update the best partition.

        Args:
            evaluator: Evaluator for the partitions' number of devices.
            cuts: Cuts of each partition, shape (partitions, stages + 1).
            choices: Recompute choice of each stage, shape (partitions, stages).
            fits: True for partitions that fit.
            known_us: Known step times, NaN for partitions to simulate; None to simulate all partitions.

        Returns:
            Step times in microseconds; infinite for partitions that do not fit.
        """
        step_us = np.full(len(cuts), inf)
        if not fits.any():
            return step_us
        is_new = fits if known_us is None else fits & np.isnan(known_us)
        if known_us is not None:
            step_us[fits] = known_us[fits]
        if is_new.any():
            step_us[is_new] = self.simulate(evaluator, cuts[is_new], choices[is_new])
        at = int(np.argmin(step_us))
        # Rounding makes equal times differ slightly. Keep the first of equal partitions.
        if step_us[at] < self.upper_us * (1 - SAME):
            self.upper_us = float(step_us[at])
            self.deadline.report_plan(self.upper_us, self.case.schedule.name)
            self.best = evaluator.case.partition(cuts[at], choices[at])
        return step_us


def run_limited_search(
    search: Callable[[SearchState], None], case: Case, *, upper_us: float, deadline: Deadline
) -> Answer:
    """Run a search within limits, and return its result.

    Args:
        search: Function that searches, and records the results in its argument.
        case: Layers, devices and schedule to plan for.
        upper_us: Step time to beat, in microseconds.
        deadline: Limits on time and on simulated actions.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found, and `upper_us` is infinite.
    """
    state = SearchState(case=case, budget=SimulationBudget(deadline.most_actions), deadline=deadline, upper_us=upper_us)
    try:
        search(state)
    except OutOfTimeError:
        if state.best is None and upper_us == inf:
            raise
        state.record_skipped(max(state.rest_us, case.bound_us))
    bound_us = min(state.bound_us, state.upper_us)
    step_us = inf if state.best is None else state.upper_us
    return Answer(case, state.best, step_us, bound_us, "simulated", state.budget.spent)
