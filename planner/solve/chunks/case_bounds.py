"""Lower bound of the step time of several cases, raised by linear programs.

A case (`planner.solve.space.case`) is a choice of schedule and numbers of chunks, micro-batches and replicas. Linear
programs are solved only for cases that have the smallest bound, because only this bound counts.

Complexity: about one CPU second, see `_MOST_WORK`.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from planner.core.extras import is_installed
from planner.solve.chunks.search import linear_program_cost, solve_linear_program, start_cuts
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.search_state import SearchState, SimulationBudget
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator

_MOST_WORK: Final = 1_500_000
"""Limit on the estimated work of all linear programs, as the number of actions simulated in the same time."""

_EQUAL: Final = 1 + 1e-9
"""Ratio up to which two bounds count as equal."""


class _CaseBound(NamedTuple):
    least_us: float
    number: int
    case: Case
    num_devices: int  # 0 if no linear program can raise the bound any more


def raised_lower_bound_us(bounds: Iterable[tuple[Case, float]], upper_us: float, deadline: Deadline) -> float:
    """Return one lower bound of the step time for all given cases, from linear programs.

    Args:
        bounds: Cases with several chunks or a split backward, each with a known lower bound in microseconds.
        upper_us: Step time of a known plan in microseconds. The result is at most this time.
        deadline: Time limit of the linear programs.
    """
    heap = [bound for case, case_us in bounds for bound in _bounds_by_devices(case, case_us, upper_us)]
    heap = [bound._replace(number=number) for number, bound in enumerate(heap)]
    heapify(heap)
    left = _MOST_WORK if is_installed("highspy") else 0
    while heap and heap[0].least_us < upper_us and heap[0].num_devices and deadline.left_s > 0:
        lowest = [heappop(heap)]
        while heap and heap[0].least_us <= lowest[0].least_us * _EQUAL:
            lowest.append(heappop(heap))
        # Unless all of the lowest bounds can be raised, none needs to be.
        final_us = min([upper_us, *(bound.least_us for bound in heap if not bound.num_devices)])
        raised, left = _raised_bounds(lowest, final_us, left, deadline)
        for bound in raised or (bound._replace(num_devices=0) for bound in lowest):
            heappush(heap, bound)
    return min([upper_us, *(bound.least_us for bound in heap)])


def _bounds_by_devices(case: Case, case_us: float, upper_us: float) -> Iterator[_CaseBound]:
    if case.is_too_large:
        return
    for num_devices in range(case.num_devices, 0, -1):
        least_us = max(case_us, case.least_step_us(num_devices))
        if least_us >= upper_us:
            return
        yield _CaseBound(least_us, 0, case, num_devices)


def _raised_bounds(
    bounds: Sequence[_CaseBound], upper_us: float, left: int, deadline: Deadline
) -> tuple[list[_CaseBound], int]:
    # Return the bounds that linear programs raised, and the work that is left; no bounds if too little is left.
    evaluators = []
    for bound in bounds:
        if not bound.num_devices:
            return [], left
        evaluators.append(Evaluator(bound.case, bound.num_devices))
        left -= linear_program_cost(evaluators[-1]) if evaluators[-1].can_run else 0
        if left < 0:
            return [], 0
    raised: list[_CaseBound] = []
    # Split backwards have smaller bounds. Larger bounds need only be raised up to the smallest one.
    pairs = zip(bounds, evaluators, strict=True)
    for bound, evaluator in sorted(pairs, key=lambda pair: not pair[0].case.schedule.splits_backward):
        if not evaluator.can_run:
            continue
        enough_us = min((bound.least_us for bound in raised), default=upper_us)
        state = SearchState(case=bound.case, budget=SimulationBudget(None), deadline=deadline, upper_us=upper_us)
        try:
            starts = start_cuts(state, evaluator)
            linear = solve_linear_program(state, evaluator, starts, enough_us=enough_us)
        except OutOfTimeError:
            return [], 0
        least_us = bound.least_us if linear is None else max(bound.least_us, linear.solution.bound_us)
        raised.append(bound._replace(least_us=least_us, num_devices=0))
    return raised, left
