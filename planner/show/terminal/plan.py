"""Plan as text: figures, stages, memory, timeline and explanation."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from planner.core.cost.simulate import Event
from planner.core.judge.certainty import Certainty
from planner.core.schedule import schedule_of
from planner.core.values.plan import Insight, Noise, Plan, WhatIf
from planner.core.values.printable import printable
from planner.core.values.units import format_bytes, format_us, pluralize
from planner.show.terminal.frontier import frontier_parts, schedules_parts
from planner.show.terminal.memory import memory_renderables
from planner.show.terminal.rendering import BLANK, heading, render, wrap_items
from planner.show.terminal.stages import recomputed_layer_names, stages_table
from planner.show.terminal.style import Style
from planner.show.terminal.tables import facts_table
from planner.show.terminal.timeline import timeline_parts
from planner.show.views.certainty import accuracy_words, fit_words, peak_words
from planner.show.views.cluster import throughput_words, training_words
from planner.show.views.numbers import not_measured_warning, percent, row_noun, solver_method_label
from planner.show.views.plan import (
    gap_words,
    gpu_noun,
    has_unlike_devices,
    ideal_bubble_words,
    optimality_text,
    plan_headline,
    step_rate_bubble_words,
)


def plan_text(
    plan: Plan,
    events: Sequence[Event],
    style: Style,
    *,
    certainty: Certainty | None = None,
) -> str:
    """Return a plan as text with all sections.

    Args:
        plan: The plan.
        events: Simulated events of one step, for the timeline; if empty, there is no timeline.
        style: Style of the output.
        certainty: Error ranges of the figures; None if they are not known.
    """
    first: list[RenderableType] = [heading(printable(plan_headline(plan)))]
    first += [*_figures(plan, certainty, style), Text(_status(plan))]
    if certainty is not None:
        reasons = printable(accuracy_words(certainty))
        first.append(wrap_items(reasons.split(), style, gap=" "))
    sections = [first, *_sections(plan, events, style)]
    parts = [part for section in sections if section for part in (*section, BLANK)]
    return render(style, *parts[:-1])


def _sections(plan: Plan, events: Sequence[Event], style: Style) -> list[list[RenderableType]]:
    notes = [not_measured_warning(plan.inputs.profile.how), _not_a_pipeline(plan), _divided(plan), _unused(plan)]
    return [
        [wrap_items([note], style) for note in notes if note],
        [stages_table(plan, style)],
        [recomputed_layer_names(stage, style) for stage in plan.stages if stage.recompute == "layers"],
        memory_renderables(plan.by_device(), style, gpus=plan.tensor_parallel),
        timeline_parts(events, plan.num_devices, style) if events else [],
        frontier_parts(plan, style),
        schedules_parts(plan, style),
        explanation_of_plan(plan, style),
    ]


def _figures(plan: Plan, certainty: Certainty | None, style: Style) -> list[Text]:
    predicted = plan.predicted
    step, speed, bubble = step_rate_bubble_words(plan, certainty)
    shares = [
        f"{bubble} ({ideal})" if (ideal := ideal_bubble_words(plan)) else bubble,
        f"imbalance {predicted.imbalance:.2f}",
        f"recompute {percent(predicted.recompute_share)}",
    ]
    lines = [[step, speed, *shares]]
    if certainty is not None:
        lines = [[step, speed, f"peak {peak_words(plan, certainty)}", fit_words(plan, certainty)], shares]
    lines += [throughput_words(plan, certainty), training_words(plan, certainty)]
    return [wrap_items(words, style, gap=" · ") for words in lines if words]


def _status(plan: Plan) -> str:
    solver = plan.solver
    method = printable(solver_method_label(solver.method))
    if solver.status == "optimal":
        return f"optimal: {optimality_text(plan)} ({method})"
    if solver.status == "feasible":
        return f"feasible, {gap_words(plan)}: {optimality_text(plan)} ({method})"
    return "given: these cuts were given, not optimized"


def _not_a_pipeline(plan: Plan) -> str:
    if plan.num_devices > 1:
        return ""
    copies, inputs = plan.replicas, plan.inputs
    alone = "one device" if plan.tensor_parallel == 1 else f"{plan.tensor_parallel} GPUs that share its layers"
    here = f"{copies} copies of the whole model" if copies > 1 else f"the whole model on {alone}"
    # If as many replicas were requested as there are devices, a pipeline was not possible.
    had_a_choice = inputs.devices // plan.tensor_parallel > max(1, inputs.replicas)
    if plan.solver.status == "given" or not had_a_choice:
        return f"not a pipeline: {here}"
    schedule = inputs.schedule
    under = "" if schedule == "auto" else f"under {schedule_of(schedule).title} "
    if plan.solver.status == "optimal":
        return f"not a pipeline: {under}no cut is faster than {here}"
    return f"not a pipeline: {under}no cut was found that is faster than {here}"


def _divided(plan: Plan) -> str:
    return f"the {plan.replicas} replicas divide the optimizer (ZeRO stage 1)" if plan.shards_optimizer else ""


def _unused(plan: Plan) -> str:
    devices = plan.inputs.devices
    spare = devices - plan.num_gpus
    if spare <= 0:
        return ""
    words = f"{spare} of {pluralize(devices, gpu_noun(plan))} left unused"
    if not has_unlike_devices(plan) or plan.replicas > 1:
        return words
    unused = sorted(set(range(devices)) - {plan.device_of(stage) for stage in plan.stages})
    return f"{words}: {'device' if spare == 1 else 'devices'} {', '.join(map(str, unused))}"


_AS_FAST = 0.0005
"""Smallest relative change of the step time that is reported; smaller changes are reported as `no faster`."""


def explanation_of_plan(plan: Plan, style: Style) -> list[RenderableType]:
    """Return the explanation of a plan (`--explain`); an empty list if the plan has no explanation."""
    insight = plan.insight
    if insight is None:
        return []
    return [heading("why this plan"), facts_table(list(_facts(plan, insight)), style)]


def _facts(plan: Plan, insight: Insight) -> Iterator[tuple[str, str]]:
    yield "bottleneck", printable(insight.pace)
    yield "tightest", _tightest(plan, insight)
    for n, what_if in enumerate(insight.what_if):
        yield "" if n else "what if", f"{printable(what_if.change)}: {_gain(what_if, plan.predicted.step_us)}"
    if insight.noise is not None:
        yield "noise", _noise(insight.noise)


def _tightest(plan: Plan, insight: Insight) -> str:
    place = insight.tightest_device
    free = f"{format_bytes(insight.free_bytes)} free"
    if place >= plan.num_devices:
        return f"device {place}, {free}"
    return f"{row_noun(plan.chunks)} {place}, {free} of {format_bytes(plan.stages[place].memory_bytes)}"


def _gain(what_if: WhatIf, step_us: float) -> str:
    faster = 1 - what_if.step_us / step_us if step_us else 0.0
    if abs(faster) < _AS_FAST:
        return "no faster"
    return f"{format_us(what_if.step_us)}, {percent(abs(faster))} {'faster' if faster > 0 else 'slower'}"


def _noise(noise: Noise) -> str:
    return (
        f"with measurement noise of ±{percent(noise.spread)}: in {noise.draws} random profiles "
        f"this plan was at most {percent(noise.worst_regret)} slower than the best one (mean "
        f"{percent(noise.mean_regret)}); it was the best in {percent(noise.same_plan, decimals=0)}"
    )
