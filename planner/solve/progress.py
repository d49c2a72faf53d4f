"""What searches that simulate partitions share: the best one so far, the effort that is left, and the deadline.

Only GPipe's step time has a closed form. Under all other schedules, the step time of a partition is that of the
simulator, which runs the action lists of the engine. Such a search has a lower bound for all partitions and a few good
ones, improved step by step. Partitions between the two are simulated too, if they are few enough: then the answer is
optimal, else it has a gap. If the effort is bounded, a search does not begin what costs more than is left; the bound of
what it left out counts instead.
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
from planner.solve.space.partitions import Many

SAME = 1e-12
"""Times closer than this are equal: they differ by rounding."""

BLOCK = 1024
"""Partitions that are simulated at once, and count once."""

_MOST_SIMULATED = 20_000
"""Partitions that are all simulated to prove the best of them."""

_MOST_ACTIONS = 2_000_000
"""Actions that are simulated in one search where effort is not bounded: some seconds."""

_FEW_BLOCKS = 8
"""Blocks of partitions that a search of bounded effort simulates, to be sure of the best."""


class Effort:
    """Actions that a search has simulated, a block of partitions counted once, and how many it still may.

    Args:
        most_actions: All effort there is, in which tables count too; None: simulation alone counts, and ends with what
            takes some seconds.
    """

    def __init__(self, most_actions: int | None) -> None:
        self.is_bounded = most_actions is not None
        self.spent = 0
        self._most_actions = _MOST_ACTIONS if most_actions is None else most_actions

    @property
    def left(self) -> int:
        """Actions that may still be simulated; not above 0 where there are none."""
        return self._most_actions - self.spent

    def pays(self, actions: int, tables: int) -> bool:
        """Whether what is left is enough for tables and for simulating so much; then the tables are paid for."""
        if not self.is_bounded:
            return True
        if tables + actions > self.left:
            return False
        self.spent += tables
        return True

    def affordable(self, many: Many) -> int:
        """How many partitions can all be simulated, with as much left for what comes afterwards."""
        blocks = max(0, self.left // (2 * many.num_actions))
        return min(_MOST_SIMULATED, BLOCK * (min(blocks, _FEW_BLOCKS) if self.is_bounded else blocks))


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state of a search over one case."""

    case: Case
    effort: Effort
    deadline: Deadline
    upper_us: float
    """The step time of the best partition, or the one to beat."""
    best: Partition | None = None
    bound_us: float = inf
    """No partition that was left out is faster."""
    rest_us: float = 0.0
    """No partition that is still to be looked at is faster."""

    def leave_out(self, bound_us: float) -> None:
        """Notes that partitions which take `bound_us` at least were not simulated."""
        self.bound_us = min(self.bound_us, bound_us)

    def simulated(
        self, many: Many, cuts: IntArray, choices: IntArray, layers_us: FloatArray | None = None
    ) -> FloatArray:
        """Step times of partitions whose memory does not matter, shape (N,); shapes as in `Many`."""
        self.effort.spent += -(-len(cuts) // BLOCK) * many.num_actions
        return many.step_us(cuts, choices, layers_us)

    def raced(self, many: Many, cuts: IntArray, choices: IntArray, fits: BoolArray) -> FloatArray:
        """Step times, infinite for partitions that do not fit; the fastest becomes the best if it beats that."""
        step_us = np.full(len(cuts), inf)
        if not fits.any():
            return step_us
        step_us[fits] = self.simulated(many, cuts[fits], choices[fits])
        at = int(np.argmin(step_us))
        # Equal times differ by rounding: the first of equal partitions stays.
        if step_us[at] < self.upper_us * (1 - SAME):
            self.upper_us = float(step_us[at])
            self.best = many.case.partition(cuts[at], choices[at])
        return step_us


def simulated_answer(search: Callable[[Progress], None], case: Case, *, upper_us: float, deadline: Deadline) -> Answer:
    """Return what a search finds that notes the best partition, and what it leaves out, in its `Progress`.

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
