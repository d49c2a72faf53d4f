"""Choice of the search function for a case, and of its effort."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from planner.core.extras import is_installed
from planner.core.schedule import SCHEDULES, SEARCHED, Schedule
from planner.core.values.plan import ScheduleName
from planner.solve.answer import Answer, Search
from planner.solve.chain.gpipe import search_gpipe
from planner.solve.request import Request
from planner.solve.space.case import Case

MOST_ACTIONS_OF_SEARCH: Final = 2_000_000
"""Number of actions simulated for all cases of the schedule `search`, whose orders the solver makes: some seconds."""

_IN_HALVES: Final = 2
"""Divisor of the effort of each named schedule with a split backward, in the first pass if the schedule is `auto`."""


def search_for(case: Case, request: Request, start: Answer | None) -> Search:
    """Return the search function for a case.

    Args:
        case: The case.
        request: The request.
        start: Answer to start from, or None. If single layers may be recomputed: an answer that recomputes whole
            stages. If the solver makes the action orders: the answer whose orders are to be improved.

    Returns:
        The search function.
    """
    # Import only the search that is needed, so that short requests, such as those of `check`, start quickly.
    if request.solver == "milp":
        from planner.solve.integer import search_integer_program  # noqa: PLC0415

        return search_integer_program
    if case.policy == "layers":
        from planner.solve.layers.search import search_layers  # noqa: PLC0415

        return partial(search_layers, by_stage=start)
    return search_gpipe if case.schedule.has_closed_form else _simulated_search(case.schedule, start)


def _simulated_search(schedule: Schedule, start: Answer | None) -> Search:
    if schedule.is_to_be_made:
        from planner.solve.orders.search import search_orders  # noqa: PLC0415

        return search_orders if start is None else partial(search_orders, start=start.partition)
    if schedule.is_one_forward_one_backward:
        from planner.solve.chain.one_forward_one_backward import search_one_forward_one_backward  # noqa: PLC0415

        return search_one_forward_one_backward
    from planner.solve.chunks.search import search_chunks  # noqa: PLC0415

    return search_chunks


def lacks_bound(schedules: Iterable[Schedule]) -> bool:
    """Return True if installing HiGHS would raise the lower bounds of answers under one of the schedules."""
    return not is_installed("highspy") and any(map(has_linear_program, schedules))


def is_improved(schedule: Schedule) -> bool:
    """Return True if the search under the schedule improves plans step by step: more effort may find faster plans."""
    return schedule.is_to_be_made or has_linear_program(schedule)


def has_linear_program(schedule: Schedule) -> bool:
    """Return True if lower bounds for plans under the schedule come from a linear program."""
    return not (schedule.has_closed_form or schedule.is_to_be_made or schedule.is_one_forward_one_backward)


def budgets(request: Request) -> dict[ScheduleName, int]:
    """Return the number of actions to simulate for all cases of a schedule; schedules not listed have no limit."""
    if request.inputs.schedule == SEARCHED.name:
        return {SEARCHED.name: MOST_ACTIONS_OF_SEARCH // 2}
    if request.inputs.schedule != "auto" or request.actions is None:
        return {}
    # There are many named schedules with a split backward, and the searched schedule starts from them as well.
    named = {name: request.actions // (_IN_HALVES if rule.splits_backward else 1) for name, rule in SCHEDULES.items()}
    return {**named, SEARCHED.name: request.actions // 4}


def effort_of(case: Case, left: Mapping[ScheduleName, int], num_cases: int, *, is_ranked: bool) -> int | None:
    """Return the number of actions that the search of a case may simulate; None if there is no limit.

    Ranked cases are searched from the most promising one on, each with half of the actions left. A search for action
    orders always uses its whole effort, so each of the remaining cases gets an equal share.

    Args:
        case: The case.
        left: Number of actions left for all remaining cases, by schedule.
        num_cases: Number of remaining cases of the schedule.
        is_ranked: True if the cases are sorted by their estimated step time.
    """
    most_actions = left.get(case.schedule.name)
    if most_actions is None:
        return None
    if is_ranked:
        return max(1, most_actions // 2)
    return most_actions // num_cases if case.schedule.is_to_be_made else most_actions


def bound_of(case: Case) -> tuple[float, ...]:
    """Return the sort key of cases of one schedule: lower bound, then number of replicas, then M."""
    return case.bound_us, case.replicas, case.micro_batches


def promise_of(case: Case) -> tuple[float, ...]:
    """Return the sort key of cases if the schedule is `auto`: the schedule, then the estimated step time."""
    rank = [*SCHEDULES, SEARCHED.name].index(case.schedule.name)
    return rank, case.bound_us if case.schedule.has_closed_form else case.ideal_us, case.replicas, case.micro_batches
