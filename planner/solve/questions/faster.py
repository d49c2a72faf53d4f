"""Short search for a plan under another schedule than the requested one: a hint, not an answer."""

from dataclasses import replace
from typing import Final

from planner.core.errors import PlannerError
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.solve.request import Request, near
from planner.solve.search import MOST_WORK, plan_under

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
    every = replace(near(inputs, plan, profile), schedule="auto", chunks=0)
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
