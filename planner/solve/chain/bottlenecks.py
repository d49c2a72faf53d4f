"""Branch and bound over the bottlenecks of a plan under GPipe: its largest forward time and its largest backward time.

Most of a step is (M-1) times the largest forward and the largest backward time of any stage or link. The dynamic
program spends most of its time on partial plans that differ in these two times. The search therefore divides their
plane into boxes. A box contains the plans whose largest times are between its two corners:

    backward  |_______________________
              |      |        |           T       step time of a plan in the box
              |______|________|           f, x    forward and backward time at the lower corner
              |      |   |    |           P       shortest time of one micro-batch, forward and backward, through
              |      |___|____|                   all stages and links
              |      |   |    |
              +-----------------------    T >= (M-1) f + (M-2) x + P
                        forward

P is a shortest path over all stages and links that take at most the times of the upper corner. The lower bound of T
leaves out the backward of the last micro-batch, whose time depends on recomputation.

Long chains on many devices get their first plans from these paths, which take far less time than the dynamic program.

Within a box, partial plans have nearly the same two times, so most of them are dominated. If few remain, the dynamic
program solves the box; otherwise it is divided in two. The box with the smallest lower bound is searched first. No plan
in another box can be faster than this bound.

Complexity: O(K L W) for each of a few dozen boxes, with K stages, L layers and W layers in the longest stage.
"""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from planner.solve.chain.chain_dp import LIMIT_FACTORS, ChainCuts, CutDynamicProgram, just_below
from planner.solve.chain.recurrences import GPipeRecurrence
from planner.solve.deadline import NEVER, Deadline
from planner.solve.space.problem import NO_LIMIT, Bottlenecks, ChainProblem

_LARGE = 10**6
"""Smallest number of layers times stages for which first plans come from shortest paths. Other searches are slow."""

_MOST_LABELS, _ENOUGH_LABELS = 400, 5000
"""Limits on the partial plans of a `_Box`: per number of stages, and in total. A box that exceeds both is divided."""

_GROWTH = 1.5
"""Factor by which the limit `_ENOUGH_LABELS` grows with each division of a `_Box`. Some boxes do not get easier."""

_SMALLEST = 1e-9
"""A `_Box` is not divided if its ranges of forward and backward times are at most this share of its largest time."""

_ROUNDING = 1 + 1e-9


class _Box(NamedTuple):
    """Plans whose largest forward and backward times are between `least` and `most`."""

    bound_us: float
    """Lower bound of the step times of the plans in the box."""
    number: int  # Boxes of equal bound are sorted by their order of creation.
    least: Bottlenecks
    most: Bottlenecks
    depth: int
    """Number of divisions that led to this box."""
    passes_us: float
    """Lower bound of the forward plus backward time of one micro-batch through all stages and links."""


class BottleneckSearch:
    """Search for the fastest partition of a chain under GPipe."""

    def __init__(self, problem: ChainProblem, micro_batches: int, *, deadline: Deadline = NEVER) -> None:
        self.best_so_far: ChainCuts | None = None
        """Fastest partition found so far."""
        self._problem, self._M, self._deadline = problem, micro_batches, deadline
        self._is_large = problem.num_layers * problem.num_stages >= _LARGE
        self._whole = CutDynamicProgram(problem, GPipeRecurrence(micro_batches), deadline=deadline)
        self.bound_us = self._whole.lower_bound_us()
        """Lower bound of the step time of all partitions; infinite if none fits."""

    def find_first(self, *, upper_us: float = np.inf) -> ChainCuts | None:
        """Return a partition with a step time below `upper_us`, from a short search; None if it finds none."""
        limit_factors = (*LIMIT_FACTORS, np.inf)
        if not self._is_large:
            self.best_so_far = self._whole.find_first(self.bound_us, upper_us, limit_factors)
            return self.best_so_far
        for factor in limit_factors:
            limit_us = min(self._upper_us(upper_us), self.bound_us * factor)
            box, search = self._restricted(self._lower_upper_corner(self._root(), limit_us))
            self._take_path(search, upper_us)
            # Plans outside of the box take longer than the limit.
            self.bound_us = max(self.bound_us, min(box.bound_us, limit_us))
            if limit_us >= self._upper_us(upper_us):
                break
        return self.best_so_far

    def find_best(self, *, upper_us: float = np.inf) -> ChainCuts | None:
        """Return the fastest partition; None if no partition has a step time below `upper_us`."""
        # With a good plan or a limit, go to the boxes directly.
        if self.best_so_far is None and upper_us == np.inf:
            self.find_first()
        boxes, count, search = [self._root()], 1, self._whole
        while boxes and boxes[0].bound_us < just_below(self._upper_us(upper_us)):
            box = heappop(boxes)
            self.bound_us = box.bound_us
            if box.number:
                box, search = self._restricted(self._lower_upper_corner(box, self._upper_us(upper_us)))
                if self._is_large:
                    self._take_path(search, upper_us)
            for part in self._search_box(box, search, self._upper_us(upper_us)):
                heappush(boxes, part._replace(number=count))
                count += 1
        self.bound_us = self._upper_us(upper_us)
        return self.best_so_far

    def _root(self) -> _Box:
        # The box of all plans.
        least = self._whole.lower_bounds()
        return _Box(
            bound_us=self.bound_us,
            number=0,
            depth=0,
            least=Bottlenecks(least["forward"], least["backward"]),
            most=NO_LIMIT,
            passes_us=least["passes"],
        )

    def _restricted(self, box: _Box) -> tuple[_Box, CutDynamicProgram]:
        # The dynamic program over the plans of a box gives a better bound of the box.
        search = CutDynamicProgram(
            self._problem.without_slower_stages(box.most),
            GPipeRecurrence(self._M, box.least),
            deadline=self._deadline,
        )
        bound_us = max(box.bound_us, search.lower_bound_us())
        return box._replace(bound_us=bound_us, passes_us=search.lower_bounds()["passes"]), search

    def _take_path(self, search: CutDynamicProgram, upper_us: float) -> None:
        # The shortest path P of a box is a plan.
        plan = search.partition_of_bound("passes")
        if plan is not None and plan.step_us < just_below(self._upper_us(upper_us)):
            self.best_so_far = plan

    def _upper_us(self, upper_us: float) -> float:
        return upper_us if self.best_so_far is None else min(upper_us, self.best_so_far.step_us)

    def _search_box(self, box: _Box, search: CutDynamicProgram, upper_us: float) -> list[_Box]:
        if not box.bound_us < just_below(upper_us):
            return []
        box = self._lower_upper_corner(box, upper_us)
        sides = [most - least for least, most in zip(box.least, box.most, strict=True)]
        is_small = max(sides) <= _SMALLEST * max(box.most)
        # With two micro-batches the step hardly depends on the bottlenecks, so division does not help.
        can_split = self._M > 2 and not is_small and np.isfinite(upper_us)
        most_plans = _MOST_LABELS if can_split else np.inf
        enough = _ENOUGH_LABELS * _GROWTH**box.depth
        plan = search.run(upper_us=upper_us, limit_per_stage_count=most_plans, limit_in_total=enough)
        if plan is not None and (self.best_so_far is None or plan.step_us < self.best_so_far.step_us):
            self.best_so_far = plan
        if search.is_exhaustive:
            return []
        (f, x), (most_f, most_x) = box.least, box.most
        if sides[0] > sides[1]:
            f_between = (f + most_f) / 2
            corners = [((f, x), (f_between, most_x)), ((f_between, x), (most_f, most_x))]
        else:
            x_between = (x + most_x) / 2
            corners = [((f, x), (most_f, x_between)), ((f, x_between), (most_f, most_x))]
        return [
            box._replace(
                bound_us=max(box.bound_us, self._bound_us(Bottlenecks(*least), box.passes_us)),
                depth=box.depth + 1,
                least=Bottlenecks(*least),
                most=Bottlenecks(*most),
            )
            for least, most in corners
        ]

    def _bound_us(self, least: Bottlenecks, passes_us: float) -> float:
        return (self._M - 1) * least.forward_us + (self._M - 2) * least.backward_us + passes_us

    def _lower_upper_corner(self, box: _Box, upper_us: float) -> _Box:
        # A plan whose largest times exceed these limits cannot be faster than `upper_us`.
        left_us = (upper_us - self._bound_us(box.least, box.passes_us)) * _ROUNDING
        if self._M <= 2 or not np.isfinite(left_us):
            return box
        most = Bottlenecks(
            min(box.most.forward_us, box.least.forward_us * _ROUNDING + left_us / (self._M - 1)),
            min(box.most.backward_us, box.least.backward_us * _ROUNDING + left_us / (self._M - 2)),
        )
        return box._replace(most=most)
