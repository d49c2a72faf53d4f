"""What searches that simulate partitions share: the best one so far, the effort that is left, and the deadline."""

from dataclasses import dataclass
from math import inf

import numpy as np

from planner.core.cost.evaluate import Partition
from planner.solve.deadline import Deadline
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

    def least_us(self, num_stages: int) -> float:
        """Below every partition into so many stages, and not larger for more of them."""
        costs, cluster = self.case.costs, self.case.cluster
        pair_us = costs.forward_us + self.case.least_backward_us
        speeds = sorted((cluster.speed(d) for d in range(self.case.num_devices)), reverse=True)
        share_us = max(float(pair_us.sum()) / sum(speeds[:num_stages]), float(pair_us.max()) / speeds[0])
        return self.case.micro_batches * share_us

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
