"""The best plan of one case whose step time has no closed form, where single layers may be recomputed.

It begins with the best plan that recomputes whole stages, as `planner.solve.simulated` finds it, and ends with one that
is no slower.
"""

from math import inf

from planner.solve.answer import Answer
from planner.solve.case import Case
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.layered_chunks import never_over, search_chunks_by_layers
from planner.solve.layered_one_chunk import search_one_chunk_by_layers
from planner.solve.progress import Effort, Progress
from planner.solve.simulated import METHOD


def layered_simulated_answer(
    case: Case,
    by_stage: Answer | None,
    *,
    upper_us: float = inf,
    deadline: Deadline = NEVER,
    most_actions: int | None = None,
) -> Answer:
    """The best partition found that beats `upper_us`, and what no partition of the case can beat.

    Args:
        case: The case.
        by_stage: The answer of the same case where whole stages are recomputed, if there is one.
        upper_us: The step time to beat; not above that of `by_stage`.
        deadline: When the search ends.
        most_actions: As for `planner.solve.simulated.simulated_answer`.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found.
    """
    progress = Progress(case=case, effort=Effort(most_actions), deadline=deadline, upper_us=upper_us)
    if by_stage is not None and never_over(progress):
        return by_stage._replace(actions=0)
    search = search_one_chunk_by_layers if case.schedule.is_one_forward_one_backward else search_chunks_by_layers
    try:
        search(progress, None if by_stage is None else by_stage.partition)
    except OutOfTimeError:
        if progress.best is None and upper_us == inf:
            raise
        progress.leave_out(max(progress.rest_us, case.bound_us))
    bound_us = min(progress.bound_us, progress.upper_us)
    step_us = inf if progress.best is None else progress.upper_us
    return Answer(case, progress.best, step_us, bound_us, METHOD, progress.effort.spent)
