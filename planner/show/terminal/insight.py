"""Why a plan is as it is: what binds it, what would change it, what noise does to it."""

from collections.abc import Iterator

from rich.console import RenderableType

from planner.core.values.plan import Insight, Noise, Plan, WhatIf
from planner.core.values.units import format_bytes, format_us
from planner.show.terminal.rendering import facts, heading, plain
from planner.show.terminal.style import Style
from planner.show.views.numbers import percent
from planner.show.views.words import place_word

_AS_FAST = 0.0005
"""Changes of the step time by a smaller share are none."""


def insight_parts(plan: Plan, style: Style) -> list[RenderableType]:
    """A short section; nothing where the plan has no explanation."""
    insight = plan.insight
    if insight is None:
        return []
    return [heading("why this plan"), facts(list(_facts(plan, insight, style)), style)]


def _facts(plan: Plan, insight: Insight, style: Style) -> Iterator[tuple[str, str]]:
    yield "pace", plain(insight.pace, style)
    yield "tightest", _tightest(plan, insight)
    for n, what_if in enumerate(insight.what_if):
        yield "" if n else "what if", f"{plain(what_if.change, style)}: {_gain(what_if, plan.predicted.step_us)}"
    if insight.noise is not None:
        yield "noise", _noise(insight.noise, style)


def _tightest(plan: Plan, insight: Insight) -> str:
    place = insight.tightest_device
    free = f"{format_bytes(insight.free_bytes)} free"
    if place >= plan.num_devices:
        return f"device {place}, {free}"
    return f"{place_word(plan.chunks)} {place}, {free} of {format_bytes(plan.stages[place].memory_bytes)}"


def _gain(what_if: WhatIf, step_us: float) -> str:
    faster = 1 - what_if.step_us / step_us if step_us else 0.0
    if abs(faster) < _AS_FAST:
        return "no faster"
    return f"{format_us(what_if.step_us)}, {percent(abs(faster))} {'faster' if faster > 0 else 'slower'}"


def _noise(noise: Noise, style: Style) -> str:
    return (
        f"with measurement noise of {style.glyphs.plus_minus}{percent(noise.spread)}: in {noise.draws} drawn profiles "
        f"this plan was at most {percent(noise.worst_regret)} slower than the best (mean "
        f"{percent(noise.mean_regret)}); the same cuts and M were best in {percent(noise.same_plan, decimals=0)}"
    )
