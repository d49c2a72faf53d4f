"""Search for the optimal plan under GPipe, and for the best of equally fast plans."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.solve.answer import Answer
from planner.solve.chain.bottlenecks import BottleneckSearch
from planner.solve.chain.chain_dp import ChainCuts, CutDynamicProgram
from planner.solve.chain.recurrences import GPipeRecurrence, TieBreakRecurrence
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.space.case import Case
from planner.solve.space.tables import max_stage_layers

DYNAMIC_PROGRAMMING = "dynamic-programming"

_EQUAL = 1e-9
"""Relative difference below which two step times count as equal."""

_FEW_LABELS = 4

_LARGEST_COMPARED = 150_000
"""Largest number of layers times stages for which all equally fast plans are compared.

Above it, the search keeps only `_FEW_LABELS` partial plans that begin at the same layer.
"""

_MOST_TIED_LABELS = 3000
"""Limit on partial plans per number of stages. Above it, the comparison of equally fast plans stops early."""

_FIRST_WINDOW = 1.5
"""Limit on stage times in the first call of `TableWidth.widen`.

Unit: mean work of a device, or time of the slowest layer if that is longer.
"""


@dataclass(slots=True)
class TableWidth:
    """Limit on the number of layers per stage in the tables of a search, which `widen` increases step by step."""

    case: Case
    most_layers: int = 0
    """Largest number of layers of a stage."""
    _longest_us: float = 0.0

    def widen(self, upper_us: float) -> bool:
        """Increase `most_layers` for plans faster than `upper_us`; return False if it already suffices.

        The number suffices if no plan faster than `upper_us` has a stage with more layers than `most_layers`.
        """
        # The tables have the stages whose time is below a limit. The first call sets a low limit. With an infinite
        # `upper_us`, later calls double it; otherwise they set it to the longest stage of a faster plan.
        case = self.case
        limit_us = case.stage_time_limit_us(upper_us)
        even_us = case.work_us * case.highest_speed / case.num_devices
        longest_layer = float((case.costs.forward_us + case.costs.backward_us).max(initial=0.0))
        self._longest_us = max(2 * self._longest_us, _FIRST_WINDOW * max(even_us, longest_layer))
        if np.isfinite(upper_us) and self.most_layers:
            self._longest_us = limit_us
        most = self._width(limit_us)
        if most <= self.most_layers:
            return False
        while True:
            most_layers = min(most, self._width(self._longest_us))
            if most_layers > self.most_layers:
                self.most_layers = most_layers
                return True
            self._longest_us = max(2 * self._longest_us, 1e-3)

    def _width(self, longest_us: float) -> int:
        return max_stage_layers(self.case.costs, longest_us=longest_us, limit_bytes=max(self.case.limits_bytes))


def search_gpipe(case: Case, *, upper_us: float = np.inf, deadline: Deadline = NEVER) -> Answer:
    """Return the fastest partition under GPipe if it beats `upper_us`. The result is optimal unless time runs out.

    Args:
        case: Layers, devices and schedule to plan for.
        upper_us: Step time to beat, in microseconds.
        deadline: Time limit.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found, and `upper_us` is infinite.
    """
    best: ChainCuts | None = None
    bound_us = case.bound_us
    table_width, is_wide = TableWidth(case), False
    search: BottleneckSearch | None = None
    try:
        # A first plan limits the stages of better plans, so search for the best one only after that.
        while table_width.widen(upper_us):
            for search in gpipe_searches(case, table_width.most_layers, deadline):
                best = best or search.find_first(upper_us=upper_us)
                upper_us = best.step_us if best is not None else upper_us
        searches = (
            (search,) if case.is_homogeneous and search else gpipe_searches(case, table_width.most_layers, deadline)
        )
        is_wide = True
        for search in searches:
            best = _faster(best, search.find_best(upper_us=upper_us))
            upper_us = best.step_us if best is not None else upper_us
        bound_us = upper_us
    except OutOfTimeError:
        best = _faster(best, search.best_so_far if search is not None else None)
        if best is None and not np.isfinite(upper_us):
            raise
        # With equal devices, one search covers all stage counts, so its bound holds for every plan.
        if case.is_homogeneous and is_wide and search is not None:
            bound_us = max(bound_us, search.bound_us)
    partition = None if best is None else case.partition(best.cuts, best.choices)
    step_us = np.inf if best is None else best.step_us
    return Answer(case, partition, step_us, min(bound_us, step_us), DYNAMIC_PROGRAMMING)


def _faster(best: ChainCuts | None, other: ChainCuts | None) -> ChainCuts | None:
    return min(filter(None, (best, other)), key=lambda cuts: cuts.step_us, default=None)


def gpipe_searches(case: Case, most_layers: int, deadline: Deadline) -> Iterator[BottleneckSearch]:
    """Yield searches for the fastest partition, which together cover every number of stages.

    Args:
        case: Layers, devices and schedule to plan for.
        most_layers: Number of layers of the longest stage.
        deadline: Time limit of the searches.
    """
    for count in _stage_counts(case):
        yield BottleneckSearch(
            case.chain_problem(count, most_layers=most_layers), case.micro_batches, deadline=deadline
        )


def _stage_counts(case: Case) -> Iterator[int]:
    if case.is_homogeneous:
        yield case.num_devices
    else:
        yield from range(case.num_devices, 0, -1)


def best_of_equally_fast(case: Case, step_us: float, *, deadline: Deadline = NEVER) -> ChainCuts | None:
    """Return the best partition with the step time `step_us`; None if none is found.

    The best partition has the lowest peak memory, then the fewest transferred bytes, then the most equal stage times.
    Above the limits `_LARGEST_COMPARED` and `_MOST_TIED_LABELS`, a better one may exist.

    Args:
        case: Layers, devices and schedule to plan for.
        step_us: The smallest step time under GPipe, in microseconds.
        deadline: Time limit.
    """
    recurrence = GPipeRecurrence(case.micro_batches)
    upper_us = step_us * (1 + _EQUAL) if step_us else 1e-9
    most_layers = max_stage_layers(
        case.costs, longest_us=case.stage_time_limit_us(upper_us), limit_bytes=max(case.limits_bytes)
    )
    lowest: ChainCuts | None = None
    for count in _stage_counts(case):
        search = CutDynamicProgram(
            case.chain_problem(count, most_layers=most_layers, every_choice=True),
            TieBreakRecurrence(recurrence, "peak"),
            deadline=deadline,
        )
        lowest = _first_by_key(search, upper_us, lowest)
    if lowest is None:
        return None
    best: ChainCuts | None = None
    for count in _stage_counts(case):
        problem = case.chain_problem(count, most_layers=most_layers, most_bytes=lowest.sort_key[0])
        best = _first_by_key(
            CutDynamicProgram(problem, TieBreakRecurrence(recurrence, "moved", "squares"), deadline=deadline),
            upper_us,
            best,
        )
    return best or lowest


def _first_by_key(search: CutDynamicProgram, upper_us: float, best: ChainCuts | None) -> ChainCuts | None:
    # A good first plan rules out most others by their sort key.
    size = search.problem.num_layers * search.problem.num_stages
    for most_plans in (_FEW_LABELS, None) if size <= _LARGEST_COMPARED else (_FEW_LABELS,):
        key = best.sort_key if best is not None else None
        first = search.run(
            upper_us=upper_us, most_plans=most_plans, best_key=key, limit_per_stage_count=_MOST_TIED_LABELS
        )
        best = first or best
    return best
