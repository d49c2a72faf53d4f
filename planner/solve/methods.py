"""Choice of the search for a case, by its schedule and the options of the request."""

from collections.abc import Iterable
from functools import partial

from planner.core.extras import is_installed
from planner.core.schedule import Schedule
from planner.solve.answer import Answer, Search
from planner.solve.chain.gpipe import search_gpipe
from planner.solve.request import Request
from planner.solve.space.case import Case


def search_for(case: Case, request: Request, by_stage: Answer | None) -> Search:
    """Return the search of a case.

    Args:
        case: The case.
        request: The request.
        by_stage: Answer of the case with whole stages recomputed, if it is known.

    Returns:
        The search.
    """
    # Import only the search that is needed, so that short requests, such as those of `check`, start quickly.
    if request.solver == "milp":
        from planner.solve.integer import search_integer_program  # noqa: PLC0415

        return search_integer_program
    if case.policy == "layers":
        from planner.solve.layers.search import search_layers  # noqa: PLC0415

        return partial(search_layers, by_stage=by_stage)
    return search_gpipe if case.schedule.has_closed_form else _simulated_search(case.schedule)


def _simulated_search(schedule: Schedule) -> Search:
    if schedule.is_to_be_made:
        from planner.solve.orders.search import search_orders  # noqa: PLC0415

        return search_orders
    if schedule.is_one_forward_one_backward:
        from planner.solve.chain.one_forward_one_backward import search_one_forward_one_backward  # noqa: PLC0415

        return search_one_forward_one_backward
    from planner.solve.chunks.search import search_chunks  # noqa: PLC0415

    return search_chunks


def lacks_bound(schedules: Iterable[Schedule]) -> bool:
    """Return True if answers under one of the schedules would have a better bound with HiGHS installed."""
    return not is_installed("highspy") and any(map(has_linear_program, schedules))


def is_improved(schedule: Schedule) -> bool:
    """Return True if plans under the schedule are improved step by step, so that more effort may find faster ones."""
    return schedule.is_to_be_made or has_linear_program(schedule)


def has_linear_program(schedule: Schedule) -> bool:
    """Return True if the bound of plans under the schedule comes from a linear program."""
    return not (schedule.has_closed_form or schedule.is_to_be_made or schedule.is_one_forward_one_backward)
