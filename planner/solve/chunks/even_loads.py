"""Cuts with the evenest work of devices, as a start for searches for cuts.

If there are many micro-batches, a step takes about as long as the work of the busiest device. A move that relieves one
of several equally busy devices then changes no simulated step. The local search in this module therefore minimizes the
sum over devices of work ** 24. It ignores memory, transfers and recomputation, so it needs no simulation.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import prefix_sums
from planner.solve.chunks.descent import ROWS, cut_moves
from planner.solve.space.case import StageRules
from planner.solve.space.partitions import Evaluator

_POWER: Final = 24
"""Exponent p in the minimized sum over devices of work ** p. It is large, so that the busiest devices count most."""

_RESTARTS: Final = 30
"""Number of restarts. Each begins with the best cuts, changed by random moves."""

_MOST_CELLS: Final = 8_000_000
"""Limit on the number of cuts computed in one search: some tenths of a second."""

_LEAST_GAIN: Final = 1e-9


def cuts_with_even_loads(evaluator: Evaluator, cuts: IntArray) -> IntArray:
    """Return cuts that distribute the work over the devices at least as evenly as `cuts`, of shape (stages + 1,)."""
    case = evaluator.case
    work_us = tuple((case.costs.forward_us + case.least_backward_us).tolist())
    chunks, speeds = tuple(evaluator.stages_by_device), tuple(evaluator.speeds.tolist())
    return _even_cuts(work_us, tuple(cuts.tolist()), chunks=chunks, speeds=speeds, rules=case.rules).copy()


@lru_cache(maxsize=64)
def _even_cuts(
    work_us: tuple[float, ...],
    cuts: tuple[int, ...],
    *,
    chunks: tuple[tuple[int, ...], ...],
    speeds: tuple[float, ...],
    rules: StageRules,
) -> IntArray:
    # Schedules with the same placement share the result.
    search = _EvenLoads(np.array(work_us), chunks=chunks, speeds=np.array(speeds), rules=rules)
    return search.search(np.array(cuts))


class _EvenLoads:
    def __init__(
        self, work_us: FloatArray, *, chunks: Sequence[Sequence[int]], speeds: FloatArray, rules: StageRules
    ) -> None:
        self._stages, self._speeds, self._rules = np.array(chunks), speeds, rules
        self._before_us = prefix_sums(work_us)
        self._mean_us = max(float(self._before_us[-1]) / len(chunks), 1e-9)
        self._moves = cut_moves(chunks)
        # The seed is fixed, so that the same request always gets the same plan.
        self._random = random.Random(0)  # noqa: S311
        self._left = _MOST_CELLS

    def search(self, cuts: IntArray) -> IntArray:
        best, unevenness = self._downhill(cuts)
        for _ in range(_RESTARTS):
            if self._left <= 0:
                break
            other, other_unevenness = self._downhill(self._random_cuts(best))
            if other_unevenness <= unevenness:
                best, unevenness = other, other_unevenness
        return best

    def _downhill(self, cuts: IntArray) -> tuple[IntArray, float]:
        unevenness, is_better = float(self._unevenness(cuts[None])[0]), True
        while is_better:
            is_better, order = False, self._random.sample(range(len(self._moves)), len(self._moves))
            for first in range(0, len(order), ROWS):
                if self._left <= 0:
                    return cuts, unevenness
                others = self._legal(cuts + self._moves[order[first : first + ROWS]])
                values = self._unevenness(others)
                if len(others) and values.min() < unevenness * (1 - _LEAST_GAIN):
                    cuts, unevenness, is_better = others[int(values.argmin())], float(values.min()), True
        return cuts, unevenness

    def _unevenness(self, cuts: IntArray) -> FloatArray:
        stages_us = np.diff(self._before_us[cuts], axis=1) / self._speeds
        loads = stages_us[:, self._stages].sum(axis=2) / self._mean_us
        unevenness: FloatArray = (loads**_POWER).sum(axis=1)
        return unevenness

    def _random_cuts(self, cuts: IntArray) -> IntArray:
        for _ in range(self._random.randint(2, 8)):
            other = self._legal(cuts[None] + self._moves[self._random.randrange(len(self._moves))])
            cuts = other[0] if len(other) else cuts
        return cuts

    def _legal(self, cuts: IntArray) -> IntArray:
        self._left -= cuts.size
        some = cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]
        return some[self._rules.allows(some)]
