"""The best plan of one case under a schedule whose step time has no closed form: any but GPipe's.

The step time of a partition is that of the simulator, which runs the very action lists of the engine. A search has a
lower bound for all partitions and a few good ones, improved step by step. What lies between the two is simulated too,
if it is little enough: then the answer is proven, else it comes with the gap between bound and best. Where the effort
is bounded, what costs more than is left of it is not begun: the bound of what was not looked at stands in for it.

Where single layers may be recomputed, it begins with the best plan that recomputes whole stages, and ends with one that
is no slower.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf

from planner.core.schedule import Schedule
from planner.solve.answer import Answer
from planner.solve.chain.one_forward_one_backward import search_one_chunk
from planner.solve.chunks.branch_and_bound import is_solvable
from planner.solve.chunks.search import search_on, search_several_chunks
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.orders.search import search_cuts_and_lists
from planner.solve.progress import Effort, Progress
from planner.solve.space.case import Case

_METHOD = "simulated"


def simulated_answer(
    case: Case,
    by_stage: Answer | None = None,
    *,
    upper_us: float = inf,
    deadline: Deadline = NEVER,
    most_actions: int | None = None,
) -> Answer:
    """The best partition found that beats `upper_us`, and what no partition of the case can beat.

    Args:
        case: The case.
        by_stage: Where single layers may be recomputed, the answer with whole stages alone, if there is one: the search
            begins with it.
        upper_us: The step time to beat; not above that of `by_stage`.
        deadline: When the search ends.
        most_actions: All effort there is, in actions simulated; None: as much as it takes, but for simulation itself.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found.
    """
    progress = Progress(case=case, effort=Effort(most_actions), deadline=deadline, upper_us=upper_us)
    search = _search_under(case.schedule)
    if case.policy == "layers":
        # What a question does without is not imported.
        from planner.solve.layers.one_chunk import search_one_chunk_by_layers  # noqa: PLC0415
        from planner.solve.layers.search import never_over, search_chunks_by_layers  # noqa: PLC0415

        if by_stage is not None and never_over(progress):
            return by_stage._replace(actions=0)
        by_layers = search_one_chunk_by_layers if search is search_one_chunk else search_chunks_by_layers
        search = partial(by_layers, near=None if by_stage is None else by_stage.partition)
    try:
        search(progress)
    except OutOfTimeError:
        if progress.best is None and upper_us == inf:
            raise
        progress.leave_out(max(progress.rest_us, case.bound_us))
    bound_us = min(progress.bound_us, progress.upper_us)
    step_us = inf if progress.best is None else progress.upper_us
    return Answer(case, progress.best, step_us, bound_us, _METHOD, progress.effort.spent)


def searched_on(answer: Answer, deadline: Deadline) -> Answer:
    """An answer that is not proven, or a better one that a longer search finds from it on, if its schedule has one.

    Args:
        answer: With a partition, the best of all cases.
        deadline: When the search ends.
    """
    assert answer.partition is not None
    case = answer.case
    if case.policy == "layers" or case.schedule.has_closed_form:
        return answer
    if _search_under(case.schedule) is not search_several_chunks:
        return answer
    progress = Progress(case=case, effort=Effort(None), deadline=deadline, upper_us=answer.step_us)
    with suppress(OutOfTimeError):
        search_on(progress, answer.partition)
    if progress.best is None:
        return answer
    return answer._replace(partition=progress.best, step_us=progress.upper_us)


def lacks_bound(schedules: Iterable[Schedule]) -> bool:
    """Whether answers under one of the schedules would have a better bound, were HiGHS installed."""
    by_programme = (schedule for schedule in schedules if not schedule.has_closed_form)
    return not is_solvable() and any(_search_under(each) is search_several_chunks for each in by_programme)


def _search_under(schedule: Schedule) -> Callable[[Progress], None]:
    if schedule.is_to_be_made:
        return search_cuts_and_lists
    return search_one_chunk if schedule.is_one_forward_one_backward else search_several_chunks
