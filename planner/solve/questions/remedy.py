"""Changes with which a plan that exceeds its memory limits would fit, computed by solving its request again."""

from collections.abc import Callable

from planner.core.errors import InfeasibleError, PlannerError
from planner.core.values.devices import accelerators_with
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.core.values.units import bytes_option, format_us
from planner.solve.request import Request
from planner.solve.search import MOST_WORK, solve

_TIME_LIMIT_S = 2.0
"""Time limit in seconds; changes that are not found by then are not reported."""

_SMALL = 10**9


def changes_that_fit(plan: Plan, profile: Profile, command: Callable[[Inputs], str]) -> tuple[str, ...]:
    """Return the smallest changes with which a plan that exceeds its memory limits would fit, in words.

    Args:
        plan: The plan. Its memory must have been computed from `profile`, and must exceed its limits.
        profile: The profile of the plan.
        command: Function that returns the command that solves a request.
    """
    return (*_more_memory(plan, profile), *_solved_again(plan, profile, command))


def _more_memory(plan: Plan, profile: Profile) -> tuple[str, ...]:
    most = max(plan.peak_bytes_by_device())
    tpu = profile.device.kind.startswith("tpu")
    cards = [card for card in accelerators_with(most) if card.name.startswith("tpu:") == tpu]
    # Plans of a few megabytes fit on every card, so naming one would not help.
    card = f", which `--device {cards[0].name}` has" if cards and most > _SMALL else ""
    return (f"with the same cuts, the whole plan fits with `--mem {bytes_option(most)}`{card}",)


def _solved_again(plan: Plan, profile: Profile, command: Callable[[Inputs], str]) -> tuple[str, ...]:
    # For larger requests even the explanation that nothing fits takes seconds.
    if len(profile.layers) * plan.inputs.devices > MOST_WORK:
        return ()
    # Leave cuts and micro-batches open. Devices, batch and rules stay unchanged.
    request = Request.of_plan(plan, micro_batches=None, time_limit_s=_TIME_LIMIT_S)
    try:
        other = solve(profile, request)
    except InfeasibleError as error:
        hints = (error.hint,) if error.hint else ()
        return (f"other cuts do not help: {error.message}", *hints)
    except PlannerError:
        return ()  # no answer in time, or the plan's inputs contradict each other
    slower = other.predicted.step_us / plan.predicted.step_us - 1
    # Name schedule and chunks: without them, more stages than devices are refused.
    placed = f", `--schedule {other.schedule} --chunks {other.chunks}`" if other.chunks > 1 else ""
    cuts = (
        f"{list(other.balance)} with M = {other.micro_batches}{placed}, {format_us(other.predicted.step_us)} per step"
    )
    return (f"the same memory limits fit the cuts {cuts} ({slower:+.1%}): `{command(other.inputs)}`",)
