"""A plan: its figures, its stages as a table, their memory, the timeline of a step, and why it is so."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from planner.core.cost.simulate import Event
from planner.core.schedule import schedule_of
from planner.core.values.plan import Plan
from planner.core.values.units import counted
from planner.show.terminal.frontier import frontier_parts
from planner.show.terminal.insight import insight_parts
from planner.show.terminal.memory import memory_parts
from planner.show.terminal.rendering import BLANK, flow, heading, plain, render
from planner.show.terminal.stages import recomputed_layers, stages_drawn
from planner.show.terminal.style import Style
from planner.show.terminal.timeline import timeline_parts
from planner.show.views.numbers import percent
from planner.show.views.plan import claim, figures, has_unlike_devices, headline
from planner.show.views.words import method_name, not_measured

_LEAST_GAP = 0.0005
"""A smaller gap would be shown as none."""


def plan_text(plan: Plan, events: Sequence[Event], style: Style) -> str:
    """Everything a plan says. `events` are those of one step under it; without any the timeline is left out."""
    sections = _sections(plan, events, style)
    parts = [part for section in sections if section for part in (*section, BLANK)]
    return render(style, *parts[:-1])


def _sections(plan: Plan, events: Sequence[Event], style: Style) -> list[list[RenderableType]]:
    notes = [not_measured(plan.inputs.profile.how), _not_a_pipeline(plan), _unused(plan)]
    return [
        [heading(plain(headline(plan), style)), _figures(plan, style), Text(_status(plan, style))],
        [flow([note], style) for note in notes if note],
        [stages_drawn(plan, style)],
        [recomputed_layers(stage, style) for stage in plan.stages if stage.recompute == "layers"],
        memory_parts(plan.stages, style, num_devices=plan.num_devices),
        timeline_parts(events, plan.num_devices, style) if events else [],
        frontier_parts(plan, style),
        insight_parts(plan, style),
    ]


def _figures(plan: Plan, style: Style) -> Text:
    predicted = plan.predicted
    step, speed, bubble = figures(plan)
    said = [
        step,
        speed,
        f"{bubble} (ideal {percent(predicted.ideal_bubble)})",
        f"imbalance {predicted.imbalance:.2f}",
        f"recompute {percent(predicted.recompute_share)}",
    ]
    return flow(said, style, gap=f" {style.glyphs.dot} ")


def _status(plan: Plan, style: Style) -> str:
    solver = plan.solver
    method = plain(method_name(solver.method), style)
    if solver.status == "optimal":
        return f"optimal: {claim(plan)} ({method})"
    if solver.status == "feasible":
        gap = percent(solver.gap) if solver.gap >= _LEAST_GAP else "below 0.1 %"
        return f"feasible, gap {gap}: {claim(plan)} ({method})"
    return "given: these cuts were asked for, not searched"


def _not_a_pipeline(plan: Plan) -> str:
    """What to know of a plan that cuts nothing."""
    if plan.num_devices > 1:
        return ""
    copies, inputs = plan.replicas, plan.inputs
    here = f"{copies} copies of the whole model" if copies > 1 else "the whole model on one device"
    # With as many replicas as devices asked for, there was nothing to choose.
    had_a_choice = inputs.devices > max(1, inputs.replicas)
    if plan.solver.status == "given" or not had_a_choice:
        return f"not a pipeline: {here}"
    asked = inputs.schedule
    under = "" if asked == "auto" else f"under {schedule_of(asked).title} "
    if plan.solver.status == "optimal":
        return f"not a pipeline: {under}no cut is faster than {here}"
    return f"not a pipeline: {under}no cut was found that is faster than {here}"


def _unused(plan: Plan) -> str:
    devices = plan.inputs.devices
    spare = devices - plan.num_devices * plan.replicas
    if spare <= 0:
        return ""
    words = f"{spare} of {counted(devices, 'device')} left unused"
    if not has_unlike_devices(plan) or plan.replicas > 1:
        return words
    unused = sorted(set(range(devices)) - {plan.device_of(stage) for stage in plan.stages})
    return f"{words}: {'device' if spare == 1 else 'devices'} {', '.join(map(str, unused))}"
