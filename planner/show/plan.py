"""A plan: its figures, its stages as a table, their memory, and the timeline of a step."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from planner.core.plan import Plan, SolverReport, Stage
from planner.core.simulate import Event
from planner.core.units import format_bytes, format_us
from planner.show.memory import memory_parts, share_of_cap
from planner.show.numbers import TimeScale, layer_range, percent
from planner.show.rendering import BLANK, Column, flow, heading, plain, render, table
from planner.show.style import Style
from planner.show.timeline import timeline_parts

__all__ = ["plan_text"]

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_MEDIUM = 76
_WIDE = 96


def plan_text(plan: Plan, events: Sequence[Event], style: Style) -> str:
    """Everything a plan says. `events` are those of one step under it; without any the timeline is left out."""
    parts = [_headline(plan, style), _figures(plan, style), Text(_status(plan.solver, style)), BLANK]
    parts.extend(_notes(plan, style))
    drawn = [BLANK, *memory_parts(plan.stages, style)]
    if events:
        drawn += [BLANK, *timeline_parts(events, len(plan.stages), style)]
    return render(style, *parts, _stage_table(plan, style), *drawn)


def _headline(plan: Plan, style: Style) -> Text:
    stages, times = _number_of(len(plan.stages), "stage"), style.glyphs.times
    micro_batches = _number_of(plan.micro_batches, "micro-batch", "es")
    samples = _number_of(plan.micro_batch_size, "sample")
    return heading(f"{_SCHEDULES[plan.schedule]}, {stages} {times} {micro_batches} of {samples}")


def _number_of(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _figures(plan: Plan, style: Style) -> Text:
    predicted = plan.predicted
    figures = [
        f"step {format_us(predicted.step_us)}",
        f"{predicted.samples_per_s:,.{1 if predicted.samples_per_s < 1000 else 0}f} samples/s",
        f"bubble {percent(predicted.bubble)} (ideal {percent(predicted.ideal_bubble)})",
        f"imbalance {predicted.imbalance:.2f}",
        f"recompute {percent(predicted.recompute_share)}",
    ]
    return flow(figures, style, gap=f" {style.glyphs.dot} ")


def _status(solver: SolverReport, style: Style) -> str:
    if solver.status == "optimal":
        return f"optimal: no plan is faster ({plain(solver.method, style)})"
    if solver.status == "feasible":
        bound = format_us(solver.lower_bound_us)
        return f"feasible, gap {percent(solver.gap)}: no plan is faster than {bound} ({plain(solver.method, style)})"
    return "given: these cuts were asked for, not searched"


def _notes(plan: Plan, style: Style) -> list[Text]:
    spare = plan.inputs.devices - len(plan.stages)
    if spare <= 0:
        return []
    return [
        flow([f"{spare} of {_number_of(plan.inputs.devices, 'device')} left unused"], style),
        BLANK,
    ]


def _stage_table(plan: Plan, style: Style) -> Table:
    scale = TimeScale.fitting(time for s in plan.stages for time in (s.forward_us, s.backward_us))
    columns = [
        Column(header="stage", number=False),
        Column(header="layers", number=False),
        Column(header="recompute", number=False),
        Column(header=f"forward\n{scale.unit}"),
        Column(header=f"backward\n{scale.unit}"),
    ]
    # What goes in few columns stands in the bars below the table as well.
    if style.has_room_for(_MEDIUM):
        columns.append(Column(header="memory"))
    if style.has_room_for(_WIDE):
        columns += [Column(header="cap"), Column(header="share")]
    rows = [_stage_row(stage, plan, scale, style)[: len(columns)] for stage in plan.stages]
    return table(columns, rows, style)


def _stage_row(stage: Stage, plan: Plan, scale: TimeScale, style: Style) -> list[str | Text]:
    slowest = len(plan.stages) > 1 and stage.index == plan.predicted.bottleneck_stage
    over = stage.memory.total > stage.memory_bytes
    return [
        f"{stage.index} {style.glyphs.slowest}" if slowest else str(stage.index),
        layer_range(stage.first, stage.last, stage.layers, style),
        stage.recompute,
        scale.text(stage.forward_us),
        scale.text(stage.backward_us),
        format_bytes(stage.memory.total),
        format_bytes(stage.memory_bytes),
        Text(f"{share_of_cap(stage)}{' !' if over else ''}", style="bold red" if over else ""),
    ]
