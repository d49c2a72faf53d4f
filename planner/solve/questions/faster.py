"""What another schedule than the one asked for would give, as far as that is known soon: a hint, not an answer."""

from dataclasses import replace
from typing import Final

from planner.core.errors import PlannerError
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.solve.request import Request
from planner.solve.search import MOST_WORK, plan_under

MOST_HINT_S: Final = 5.0
"""Longer nobody waits for a hint."""

_ACTIONS = 300_000
"""For each schedule; about a second."""

_LEAST_GAIN = 0.005
"""A share of the step time that is worth a remark."""


def faster_schedule(
    profile: Profile, plan: Plan, *, micro_batches: int | None = None, time_limit_s: float = MOST_HINT_S
) -> Plan | None:
    """A plan under another schedule than was asked for that is faster, if one is soon found.

    Args:
        profile: What the layers cost.
        plan: The answer under the schedule asked for.
        micro_batches: M, if it was fixed.
        time_limit_s: For the search, which is bounded besides.

    Returns:
        None, too, where there is nothing to compare: cuts that were given, a schedule that was left open, what only
        that schedule can do, a TPU, too many layers and devices.
    """
    inputs = plan.inputs
    if inputs.schedule == "auto" or plan.solver.status == "given" or inputs.any_order:
        return None
    if profile.device.kind.startswith("tpu") or len(profile.layers) * inputs.devices > MOST_WORK:
        return None
    every = replace(inputs, schedule="auto", chunks=0)
    request = Request(inputs=every, micro_batches=micro_batches, time_limit_s=time_limit_s, actions=_ACTIONS)
    upper_us = plan.predicted.step_us * (1 - _LEAST_GAIN)
    try:
        return plan_under({*SCHEDULES, SEARCHED.name} - {inputs.schedule}, profile, request, upper_us=upper_us)
    except PlannerError:
        return None  # other schedules cannot do what was asked
