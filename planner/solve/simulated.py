"""The best plan of one case under a schedule whose step time has no closed form: any but GPipe's.

The step time of a partition is that of the simulator, which runs the very action lists of the engine. A search has a
lower bound for all partitions and a few good ones, improved step by step. What lies between the two is simulated too,
if it is little enough: then the answer is proven, else it comes with the gap between bound and best. Where the effort
is bounded, what costs more than is left of it is not begun: the bound of what was not looked at stands in for it.
"""

from collections.abc import Callable, Iterable
from math import inf

from planner.core.schedule import Schedule
from planner.solve.answer import Answer
from planner.solve.case import Case
from planner.solve.cut_programme import is_solvable
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.joint import search_cuts_and_lists
from planner.solve.one_chunk import search_one_chunk
from planner.solve.progress import Effort, Progress
from planner.solve.several_chunks import search_several_chunks

METHOD = "simulated"


def simulated_answer(
    case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER, most_actions: int | None = None
) -> Answer:
    """The best partition found that beats `upper_us`, and what no partition of the case can beat.

    Args:
        case: The case.
        upper_us: The step time to beat.
        deadline: When the search ends.
        most_actions: All effort there is, in actions simulated; None: as much as it takes, but for simulation itself.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found.
    """
    progress = Progress(case=case, effort=Effort(most_actions), deadline=deadline, upper_us=upper_us)
    try:
        _search_under(case.schedule)(progress)
    except OutOfTimeError:
        if progress.best is None:
            raise
        progress.leave_out(max(progress.rest_us, case.bound_us))
    bound_us = min(progress.bound_us, progress.upper_us)
    step_us = inf if progress.best is None else progress.upper_us
    return Answer(case, progress.best, step_us, bound_us, METHOD, progress.effort.spent)


def lacks_bound(schedules: Iterable[Schedule]) -> bool:
    """Whether answers under one of the schedules would have a better bound, were HiGHS installed."""
    by_programme = (schedule for schedule in schedules if not schedule.has_closed_form)
    return not is_solvable() and any(_search_under(each) is search_several_chunks for each in by_programme)


def _search_under(schedule: Schedule) -> Callable[[Progress], None]:
    if schedule.is_to_be_made:
        return search_cuts_and_lists
    return search_one_chunk if schedule.is_one_forward_one_backward else search_several_chunks
