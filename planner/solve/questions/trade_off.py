"""Comparison of schedules: the best plan that a short search finds under each schedule."""

from dataclasses import replace
from math import inf
from typing import Final

from planner.core.schedule import SCHEDULES, SEARCHED, schedule_of
from planner.core.values.plan import FrontierPoint, Plan, ScheduleName
from planner.core.values.profile import Profile
from planner.solve.cases import cases_of
from planner.solve.deadline import UNWATCHED, SearchObserver
from planner.solve.questions.insight import point_of
from planner.solve.request import Request, fix_widths
from planner.solve.search import MOST_WORK, plan_under

_ACTIONS: Final = 60_000
"""Number of actions simulated per schedule: at most some tenths of a second."""


def trade_off_of(
    profile: Profile, plan: Plan, *, micro_batches: int | None = None, watch: SearchObserver = UNWATCHED
) -> tuple[FrontierPoint, ...]:
    """Return the figures of a good plan under each schedule, in the usual order of schedules.

    Each search is short, so a schedule may have a faster plan than the one reported. If a search finds no plan, the
    point's `fits` is False. If the profile has several tensor-parallel widths, the plan's width and replicas are kept.
    Schedules with a split backward are tried only if the profile has split backward times.

    Args:
        profile: The profile to plan for.
        plan: The answer to a request with the schedule `auto`; its own schedule gets the plan's figures.
        micro_batches: M, if the request fixed it; else None.
        watch: Observer of the searches; if it stops them, the points are not usable.

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
        inputs=fix_widths(inputs, plan, profile),
        micro_batches=micro_batches,
        actions=_ACTIONS,
        searches_on=False,
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
    best = plan if name == plan.schedule else _plan_under(name, profile, request, plan.micro_batches)
    if best is None:
        return FrontierPoint(micro_batches=0, micro_batch_size=0, schedule=name, fits=False)
    return point_of(best)


def _plan_under(name: ScheduleName, profile: Profile, request: Request, usual: int) -> Plan | None:
    schedule = schedule_of(name)
    requests = [replace(request, micro_batches=usual), request]
    if schedule.has_closed_form or schedule.is_one_forward_one_backward:
        requests = [request]
    # A short search divided among all values of M would have too little effort for each, so `usual` comes first.
    elif schedule.is_to_be_made:
        requests = requests[:1]
    found = (plan_under({name}, profile, each, upper_us=inf) for each in requests)
    return next((plan for plan in found if plan is not None), None)
