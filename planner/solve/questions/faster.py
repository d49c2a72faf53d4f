"""Short searches for a faster plan than the requested kind, with another schedule or with replicas: hints only."""

from dataclasses import replace
from typing import Final

from planner.core.errors import PlannerError
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.solve.request import Request, fix_widths
from planner.solve.search import MOST_WORK, plan_under, solve

MOST_HINT_S: Final = 5.0
"""Most seconds to wait for a hint."""

_ACTIONS = 300_000
"""Actions to simulate per schedule: about a second."""

_LEAST_GAIN = 0.005
"""Smallest gain that is worth a hint, as a share of the step time."""


def faster_schedule(
    profile: Profile, plan: Plan, *, micro_batches: int | None = None, time_limit_s: float = MOST_HINT_S
) -> Plan | None:
    """Return a faster plan under another schedule than the requested one, if a short search finds it.

    Args:
        profile: The profile to plan for.
        plan: The plan under the requested schedule.
        micro_batches: M, if it was fixed.
        time_limit_s: Time limit of the search in seconds; its effort is bounded as well.

    Returns:
        The plan. None if there is none, or nothing to compare: given cuts, an open schedule, options that only the
        requested schedule supports, a TPU, or too many layers and devices.
    """
    inputs = plan.inputs
    if inputs.schedule == "auto" or plan.solver.status == "given":
        return None
    if profile.device.kind.startswith("tpu") or len(profile.layers) * inputs.devices > MOST_WORK:
        return None
    every = replace(fix_widths(inputs, plan, profile), schedule="auto", chunks=0)
    request = Request(
        inputs=every,
        micro_batches=micro_batches,
        time_limit_s=time_limit_s,
        actions=_ACTIONS,
        searches_on=False,
    )
    upper_us = plan.predicted.step_us * (1 - _LEAST_GAIN)
    try:
        return plan_under({*SCHEDULES, SEARCHED.name} - {inputs.schedule}, profile, request, upper_us=upper_us)
    except PlannerError:
        return None  # other schedules do not support the options


def plan_with_replicas(
    profile: Profile, plan: Plan, *, micro_batches: int | None = None, time_limit_s: float = MOST_HINT_S
) -> Plan | None:
    """Return a faster plan with several replicas, if the plan leaves devices unused and a short search finds one.

    Args:
        profile: The profile to plan for.
        plan: The plan with one replica.
        micro_batches: M, if it was fixed.
        time_limit_s: Time limit of the search in seconds; its effort is bounded as well.

    Returns:
        The plan. None if there is none, or nothing to compare: no unused device, requested replicas, given cuts, or
        too many layers and devices.
    """
    inputs = plan.inputs
    if inputs.replicas != 1 or plan.num_gpus >= inputs.devices:
        return None
    if plan.solver.status == "given" or len(profile.layers) * inputs.devices > MOST_WORK:
        return None
    request = Request(
        inputs=replace(inputs, replicas=0),
        micro_batches=micro_batches,
        time_limit_s=time_limit_s,
        actions=_ACTIONS,
        searches_on=False,
    )
    try:
        several = solve(profile, request, breaks_ties=False)
    except PlannerError:
        return None  # unequal devices, or no time
    is_faster = several.predicted.step_us < plan.predicted.step_us * (1 - _LEAST_GAIN)
    return several if is_faster and several.replicas > 1 else None
