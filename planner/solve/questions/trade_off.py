"""Comparison of schedules: the best plan found under each schedule."""

from dataclasses import replace
from math import inf
from typing import Final

from planner.core.schedule import SCHEDULES, SEARCHED, schedule_of
from planner.core.values.plan import FrontierPoint, Plan, ScheduleName
from planner.core.values.profile import Profile
from planner.solve.cases import cases_of
from planner.solve.deadline import UNWATCHED, SearchObserver
from planner.solve.questions.insight import frontier_point_of
from planner.solve.request import Request, limited_to_plan_width
from planner.solve.search import MOST_WORK, plan_with_schedules

_SHORT_ACTIONS: Final = 60_000
"""Number of actions that a short search simulates per schedule. This takes at most some tenths of a second."""


def figures_by_schedule(
    profile: Profile,
    plan: Plan,
    *,
    micro_batches: int | None = None,
    watch: SearchObserver = UNWATCHED,
    is_short_search: bool = False,
) -> tuple[FrontierPoint, ...]:
    """Return the figures of a good plan under each schedule, in the order of `planner.core.schedule.SCHEDULES`.

    If a search finds no plan, the point's `fits` is False. If the profile has several tensor-parallel widths, all
    points have the width and the replicas of `plan`.

    Args:
        profile: The profile to plan for.
        plan: Answer to a request with the schedule `auto`. The point for the plan's schedule has the plan's figures.
        micro_batches: Number of micro-batches, if the request fixed it; else None.
        watch: Callbacks of the searches. If they stop a search, the result is not usable.
        is_short_search: True to search only for some tenths of a second per schedule.

    Returns:
        The points. Empty if there is nothing to compare: the request fixed the schedule or the cuts, the pipeline has
        one device, or there are too many layers and devices.
    """
    inputs = plan.inputs
    if inputs.schedule != "auto" or plan.solver.status == "given" or plan.num_devices < 2:
        return ()
    if len(profile.layers) * inputs.devices > MOST_WORK:
        return ()
    request = Request(
        inputs=limited_to_plan_width(inputs, plan, profile),
        micro_batches=micro_batches,
        actions=_SHORT_ACTIONS if is_short_search else None,
        searches_longer=False,
        watch=watch,
    )
    tried = {case.schedule.name for case in cases_of(profile, request)}
    names = [name for name in (*SCHEDULES, SEARCHED.name) if name in tried]
    points: dict[ScheduleName, FrontierPoint] = {}
    for name in names if len(names) > 1 else ():
        point = _point(profile, request, plan, name)
        # A search for action orders that finds nothing better returns the plan of a named schedule.
        before = points.get(point.schedule)
        if before is None or (point.fits and point.step_us < before.step_us and point.schedule != plan.schedule):
            points[point.schedule] = point
    return tuple(points.values())


def _point(profile: Profile, request: Request, plan: Plan, name: ScheduleName) -> FrontierPoint:
    if name == plan.schedule:
        return frontier_point_of(plan)
    schedule = schedule_of(name)
    is_proven = schedule.has_closed_form or schedule.is_one_forward_one_backward
    is_short = request.actions is not None and not is_proven
    requests = [request]
    if is_short:
        # A short search divided among all values of M would be too short for each, so the plan's M comes first.
        own_m = replace(request, micro_batches=plan.micro_batches)
        requests = [own_m] if schedule.needs_search else [own_m, request]
    plans = (plan_with_schedules({name}, profile, each, upper_us=inf) for each in requests)
    best = next((plan for plan in plans if plan is not None), None)
    if best is None:
        return FrontierPoint(micro_batches=0, micro_batch_size=0, schedule=name, fits=False, short_search=is_short)
    return replace(frontier_point_of(best), short_search=is_short)
