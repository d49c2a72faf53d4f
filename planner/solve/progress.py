"""State of searches that simulate partitions: the best partition so far, the effort left, and the deadline.

Only GPipe's step time has a closed form. Under all other schedules, the simulator computes it from the action orders.
Such a search has a lower bound for all partitions and improves a few good ones step by step. If few partitions lie
between the two, all of them are simulated, and the answer is optimal; otherwise it has a gap. If the effort is bounded,
a search skips whatever costs more than is left, and counts the lower bound of the skipped partitions instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.core.cost.partition import Partition
from planner.solve.answer import Answer
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.space.arrays import BoolArray, FloatArray, IntArray
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator

SAME = 1e-12
"""Relative difference below which two times are equal; rounding causes such differences."""

BLOCK = 1024
"""Partitions simulated in one batch; as effort, a batch counts as one partition."""

_MOST_SIMULATED = 20_000
"""Most partitions of which all are simulated to prove the best one."""

_MOST_ACTIONS = 2_000_000
"""Actions simulated in one search of unbounded effort: some seconds."""

_FEW_BLOCKS = 8
"""Most blocks of partitions that a search of bounded effort simulates to prove the best one."""


class Effort:
    """Number of actions that a search has simulated, and its limit; a batch of partitions counts as one.

    Args:
        most_actions: Limit; tables count as well. None: a limit of some seconds, in which only simulation counts.
    """

    def __init__(self, most_actions: int | None) -> None:
        self.is_bounded = most_actions is not None
        self.spent = 0
        self._most_actions = _MOST_ACTIONS if most_actions is None else most_actions

    @property
    def left(self) -> int:
        """Actions that may still be simulated; 0 or less if none."""
        return self._most_actions - self.spent

    def try_reserve(self, actions: int, tables: int) -> bool:
        """Return True if the effort left covers `tables` and `actions`; `tables` is then counted as spent."""
        if not self.is_bounded:
            return True
        if tables + actions > self.left:
            return False
        self.spent += tables
        return True

    def affordable(self, evaluator: Evaluator) -> int:
        """Return how many partitions half of the remaining effort can simulate."""
        blocks = max(0, self.left // (2 * evaluator.num_actions))
        return min(_MOST_SIMULATED, BLOCK * (min(blocks, _FEW_BLOCKS) if self.is_bounded else blocks))


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of a search over one case."""

    case: Case
    effort: Effort
    deadline: Deadline
    upper_us: float
    """Step time of the best partition, or the one to beat."""
    best: Partition | None = None
    bound_us: float = inf
    """Lower bound of the partitions that were left out."""
    rest_us: float = 0.0
    """Lower bound of the partitions that are still to be searched."""

    def leave_out(self, bound_us: float) -> None:
        """Record that partitions with the lower bound `bound_us` were not simulated."""
        self.bound_us = min(self.bound_us, bound_us)

    def simulate(
        self, evaluator: Evaluator, cuts: IntArray, choices: IntArray, layers_us: FloatArray | None = None
    ) -> FloatArray:
        """Return simulated step times of partitions, shape (N,), and count the effort.

        Args:
            evaluator: Evaluator for the partitions' number of devices.
            cuts: Shape (N, S+1).
            choices: Shape (N, S).
            layers_us: Forward times of single recomputed layers, see `Evaluator.step_us`; shape (N, S).
        """
        self.effort.spent += -(-len(cuts) // BLOCK) * evaluator.num_actions
        return evaluator.step_us(cuts, choices, layers_us)

    def simulate_fitting(self, evaluator: Evaluator, cuts: IntArray, choices: IntArray, fits: BoolArray) -> FloatArray:
        """Simulate the partitions that fit, and update the best partition.

        Args:
            evaluator: The partitions' devices and schedule.
            cuts: Shape (N, S+1).
            choices: Recomputation of each stage, shape (N, S).
            fits: Which partitions fit, shape (N,).

        Returns:
            Step times, shape (N,); infinite for partitions that do not fit.
        """
        step_us = np.full(len(cuts), inf)
        if not fits.any():
            return step_us
        step_us[fits] = self.simulate(evaluator, cuts[fits], choices[fits])
        at = int(np.argmin(step_us))
        # Rounding makes equal times differ slightly. Keep the first of equal partitions.
        if step_us[at] < self.upper_us * (1 - SAME):
            self.upper_us = float(step_us[at])
            self.deadline.note(self.upper_us, self.case.schedule.name)
            self.best = evaluator.case.partition(cuts[at], choices[at])
        return step_us


def simulated_answer(search: Callable[[Progress], None], case: Case, *, upper_us: float, deadline: Deadline) -> Answer:
    """Run a search that records its results in a `Progress`, and return them as an answer.

    Args:
        search: The search.
        case: The case.
        upper_us: Step time to beat.
        deadline: Time limit and effort.

    Returns:
        The best partition found, with the lower bound of all partitions.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found, and `upper_us` is infinite.
    """
    progress = Progress(case=case, effort=Effort(deadline.most_actions), deadline=deadline, upper_us=upper_us)
    try:
        search(progress)
    except OutOfTimeError:
        if progress.best is None and upper_us == inf:
            raise
        progress.leave_out(max(progress.rest_us, case.bound_us))
    bound_us = min(progress.bound_us, progress.upper_us)
    step_us = inf if progress.best is None else progress.upper_us
    return Answer(case, progress.best, step_us, bound_us, "simulated", progress.effort.spent)
