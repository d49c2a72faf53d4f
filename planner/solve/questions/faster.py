"""Short searches for a faster plan with another schedule or with replicas. The results are hints only."""

from dataclasses import replace
from typing import Final

from planner.core.errors import PlannerError
from planner.core.schedule import SCHEDULES, schedule_of
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.solve.methods import gains_from_longer_search
from planner.solve.request import Request, limited_to_plan_width
from planner.solve.search import MOST_WORK, plan_with_schedules, solve

MOST_HINT_S: Final = 5.0
"""Time limit of the search for a hint, in seconds."""

_LEAST_ACTIONS, _MOST_ACTIONS = 20_000, 300_000
"""Smallest and largest limit on simulated actions per schedule. The search with replicas always uses the largest."""

_ACTIONS_OF_LAYER, _ACTIONS_OF_STEP = 200, 60
"""Number of actions to simulate per layer; or per pair of device and micro-batch, if this total is larger."""

_LONGER = 2
"""Multiplier of the number of simulated actions, if `gains_from_longer_search` is true for the plan's schedule."""

_LEAST_GAIN = 0.005
"""Smallest gain that is reported, as a share of the step time."""


def find_faster_schedule_plan(
    profile: Profile, plan: Plan, *, micro_batches: int | None = None, time_limit_s: float = MOST_HINT_S
) -> Plan | None:
    """Return a faster plan under another schedule than the requested one, if a short search finds it.

    Plans with searched action orders are left out, because a search for orders takes longer.

    Args:
        profile: The profile to plan for.
        plan: The plan under the requested schedule.
        micro_batches: Number of micro-batches, if the request fixed it; else None.
        time_limit_s: Time limit of the search in seconds.

    Returns:
        The plan; None if the search finds none. None without a search if the cuts are given, the schedule is `auto`,
        no other schedule supports the options, the device is a TPU, or there are too many layers and devices.
    """
    inputs = plan.inputs
    if inputs.schedule == "auto" or plan.solver.status == "given":
        return None
    if profile.device.kind.startswith("tpu") or len(profile.layers) * inputs.devices > MOST_WORK:
        return None
    every = replace(limited_to_plan_width(inputs, plan, profile), schedule="auto", chunks=0)
    of_step = _ACTIONS_OF_STEP * plan.num_devices * plan.micro_batches
    actions = max(_LEAST_ACTIONS, _ACTIONS_OF_LAYER * len(profile.layers), of_step)
    actions *= _LONGER if gains_from_longer_search(schedule_of(plan.schedule, plan.order)) else 1
    request = _short_request(every, micro_batches, time_limit_s=time_limit_s, actions=min(actions, _MOST_ACTIONS))
    upper_us = plan.predicted.step_us * (1 - _LEAST_GAIN)
    try:
        return plan_with_schedules({*SCHEDULES} - {inputs.schedule}, profile, request, upper_us=upper_us)
    except PlannerError:
        return None  # other schedules do not support the options


def _short_request(
    inputs: Inputs, micro_batches: int | None, *, time_limit_s: float = MOST_HINT_S, actions: int = _MOST_ACTIONS
) -> Request:
    return Request(
        inputs=inputs, micro_batches=micro_batches, time_limit_s=time_limit_s, actions=actions, searches_longer=False
    )


def plan_with_replicas(profile: Profile, plan: Plan, *, micro_batches: int | None = None) -> Plan | None:
    """Return a faster plan with several replicas, if `plan` leaves devices unused and a short search finds one.

    Args:
        profile: The profile to plan for.
        plan: The plan with one replica.
        micro_batches: Number of micro-batches, if the request fixed it; else None.

    Returns:
        The plan; None if the search finds none. None without a search if no device is unused, the request fixes the
        replicas or the cuts, or there are too many layers and devices.
    """
    inputs = plan.inputs
    if inputs.replicas != 1 or plan.num_gpus >= inputs.devices:
        return None
    if plan.solver.status == "given" or len(profile.layers) * inputs.devices > MOST_WORK:
        return None
    request = _short_request(replace(inputs, replicas=0), micro_batches)
    try:
        several = solve(profile, request, breaks_ties=False)
    except PlannerError:
        return None  # unequal devices, or no time
    is_faster = several.predicted.step_us < plan.predicted.step_us * (1 - _LEAST_GAIN)
    return several if is_faster and several.replicas > 1 else None
