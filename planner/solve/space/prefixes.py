"""Lower bounds for the layers before a cut, over all ways to divide these layers into stages.

Each stage has a value, such as its forward time. The bound is the smallest possible maximum, or sum, of the values.

Complexity: O(K L W) time for K stages of at most W of L layers, and O(K L) memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.solve.deadline import NEVER, Deadline
from planner.solve.space.problem import ChainProblem, StageTimeArrays

MOST_CANDIDATES: Final = 1 << 20
"""Number of stages computed in one batch, which limits temporary memory."""

_MOST_AT_ONCE = 1 << 18
"""Largest number of stages whose times are stored. Times of more stages are computed each time they are needed."""


class BoundedQuantity(NamedTuple):
    """Quantity of a partition for which `PrefixBounds` has lower bounds, such as the longest forward time."""

    combine: np.ufunc
    """Maximum or sum over the stages."""
    stage_values: Callable[[StageTimeArrays], FloatArray]
    """Function that returns the value of each stage, for example its forward time."""


class PrefixBounds:
    """Lower bounds of values such as the longest stage time, for the layers before each cut."""

    def __init__(
        self, problem: ChainProblem, kinds: Mapping[str, BoundedQuantity], *, deadline: Deadline = NEVER
    ) -> None:
        self._problem, self._kinds, self._deadline = problem, kinds, deadline
        cells = len(problem.tables[0]) * (problem.num_layers + 1) * problem.most_layers
        is_once = problem.is_uniform and cells <= _MOST_AT_ONCE
        self.shared_stages = self.stages(0, np.arange(problem.num_layers + 1)) if is_once else None
        """Stages that end at each cut; None if they depend on the number of later stages, or are too many to store."""
        self.least = self._least_of_prefixes()
        """Lower bounds of each quantity in `kinds`, by name.

        Entry [r][i] is for layers 0..i-1 in at most r stages, or exactly r if `ChainProblem.is_count_exact`.
        """

    def cuts_with_smallest_maximum(self, name: str) -> tuple[int, ...] | None:
        """Return the cuts that minimize a quantity, such as the longest backward time; None if no partition fits.

        `name` is the key of this quantity in the argument `kinds` of the class.
        """
        firsts = [int(stage.first[0]) for stage in self.stages_of_bound(name)]
        return (*firsts[::-1], self._problem.num_layers) if firsts else None

    def stages_of_bound(self, name: str) -> Iterator[StageTimeArrays]:
        """Yield the stages of a partition that minimizes a quantity, from the last stage to the first.

        `name` is the key of this quantity in the argument `kinds` of the class. All devices and links must be equal, or
        the number of stages must be fixed. Each result is one stage, in arrays with one entry. If no partition fits,
        nothing is yielded.
        """
        least, (combine, stage_values) = self.least[name], self._kinds[name]
        end, num_stages = self._problem.num_layers, self._problem.num_stages
        if not np.isfinite(least[num_stages][end]):
            return
        for num_later in range(num_stages):
            # Choose the stage that minimizes the maximum, or the sum, of itself and of all earlier stages.
            stages = self.stages(num_later, np.array([end]))
            values = combine(least[num_stages - num_later - 1][stages.first], stage_values(stages))
            chosen = stages.select(*np.unravel_index([np.argmin(values)], values.shape))
            yield chosen
            end = int(chosen.first[0])
            if not end:
                return

    def _least_of_prefixes(self) -> dict[str, list[FloatArray]]:
        num, most_layers, most = self._problem.num_layers, self._problem.most_layers, self._problem.num_stages
        start = np.where(np.arange(num + 1) == 0, 0.0, np.inf)
        least = {name: [start] for name in self._kinds}
        columns: dict[str, FloatArray] = {}
        # Bounds of the layers before each stage of the tables; infinite for negative layers. The buffer is reused.
        in_front = np.full(most_layers + num, np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(in_front, most_layers).T
        for count in range(1, most + 1):
            self._deadline.check()
            if not columns or (self._problem.is_count_exact and self.shared_stages is None):
                # With an exact number of stages, the first stages of the chain have the highest levels. Otherwise a
                # stage may have any level.
                levels = [most - count] if self._problem.is_count_exact else range(most)
                # Minima over the first axis are several times faster.
                columns = {name: np.ascontiguousarray(row.T) for name, row in self._least_of_stages(levels).items()}
            ends = slice(max(0, num - (most - count) * most_layers), min(num, count * most_layers) + 1)
            for name, (combine, _) in self._kinds.items():
                before = least[name][-1]
                in_front[most_layers:] = before[:-1]
                longer = np.full(num + 1, np.inf)
                np.minimum.reduce(combine(windows[:, ends], columns[name][:, ends]), axis=0, out=longer[ends])
                least[name].append(longer if self._problem.is_count_exact else np.minimum(longer, before))
        return least

    def _least_of_stages(self, levels: Iterable[int]) -> dict[str, FloatArray]:
        least: dict[str, FloatArray] = {}
        # Equal devices share one table for all of their levels.
        level_of = {id(self._problem.tables[num_later]): num_later for num_later in reversed(list(levels))}
        for num_later in level_of.values():
            for name, values in self._values_of_stages(num_later).items():
                least[name] = np.minimum(least[name], values) if name in least else values
        return least

    def _values_of_stages(self, num_later: int) -> dict[str, FloatArray]:
        if self.shared_stages is not None:
            return {name: kind.stage_values(self.shared_stages).min(axis=0) for name, kind in self._kinds.items()}
        num, most_layers = self._problem.num_layers + 1, self._problem.most_layers
        values = {name: np.empty((num, most_layers)) for name in self._kinds}
        size = max(1, MOST_CANDIDATES // most_layers // len(self._problem.tables[num_later]))
        for start in range(0, num, size):
            ends = np.arange(start, min(start + size, num))
            stages = self.stages(num_later, ends)
            for name, kind in self._kinds.items():
                values[name][ends] = kind.stage_values(stages).min(axis=0)
        return values

    def stages(self, num_later: int, ends: IntArray) -> StageTimeArrays:
        """Return all stages that end at the cuts `ends` and have `num_later` later stages."""
        options = range(len(self._problem.tables[num_later]))
        return StageTimeArrays.stacked([self._problem.stages(num_later, option, ends) for option in options])
