"""A run report: what training under a plan really took, beside what the plan predicted.

Times are compared per stage, peak memory per device: chunks that share one share its allocator.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from planner.core.judge.verification import timed_steps_us
from planner.core.values.plan import Plan
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes
from planner.show.terminal.rendering import BLANK, Column, flow, heading, plain, render, table
from planner.show.terminal.style import Style
from planner.show.terminal.tables import drawn
from planner.show.views.measured import HEADERS, OF_REPLICAS, Beside, beside, ran_other_stages
from planner.show.views.numbers import NOTHING, TimeScale, percent, rate
from planner.show.views.run import WAITING, pipeline_words, run_table

__all__ = ["comparison_text", "run_text"]

_Row = list[str | Text]


def run_text(report: RunReport, plan: Plan | None, style: Style) -> str:
    """What the run took; with the plan it ran under, predicted beside measured, else measured stage by stage."""
    parts: list[RenderableType] = [heading(f"run of {len(report.losses)} steps on {pipeline_words(report)}")]
    parts += [_facts(report, style), _steps(report, style), BLANK]
    if plan is not None:
        parts += [*_comparison(plan, report, style), BLANK]
    if plan is None or any(stage.idle_us for stage in report.stages):
        parts += _measured(report, style)
    return render(style, *parts)


def comparison_text(plan: Plan, report: RunReport, style: Style) -> str:
    """Predicted beside measured: the step, forward and backward per stage, and peak memory per device."""
    return render(style, *_comparison(plan, report, style))


def _facts(report: RunReport, style: Style) -> Text:
    device, environment = report.device, report.environment
    facts = [
        plain(f"{device.kind} {device.name}".strip(), style),
        plain(environment.dtype, style),
        plain(f"torch {environment.torch}", style) if environment.torch else "",
        "" if report.seed is None else f"seed {report.seed}",
    ]
    if report.losses:
        facts.append(f"loss {report.losses[0]:.4g} {style.glyphs.arrow} {report.losses[-1]:.4g}")
    return flow(filter(None, facts), style, gap=f" {style.glyphs.dot} ")


def _steps(report: RunReport, style: Style) -> Text:
    steps = timed_steps_us(report)
    if not steps:
        return Text("no step was timed")
    scale = TimeScale.fitting(steps)
    spread = f"fastest {scale.text(min(steps))}, slowest {scale.text(max(steps))}"
    warm_up = f"after {report.warmup_steps} to warm up" if len(report.step_us) > len(steps) else "warm-up included"
    said = [f"step {scale.text(median(steps))} {scale.unit}, median of {len(steps)} {warm_up};", spread]
    speeds = report.samples_per_s[-len(steps) :]
    if speeds:
        said.append(f"({rate(median(speeds))} samples/s)")
    return flow(said, style, gap=" ")


def _measured(report: RunReport, style: Style) -> list[RenderableType]:
    """Stage by stage: times of a micro-batch, waiting of a step, memory; columns of zeros are left out."""
    view = run_table(report)
    view = view.without(*(name for name in WAITING if not any(view.column(name).values)))
    parts: list[RenderableType] = [drawn(view, style)]
    if any(column.per == "step" for column in view.columns):
        said = "transfer and idle: waiting in a whole step; other times: of one micro-batch"
        parts.append(flow(said.split(), style, gap=" "))
    return parts


def _comparison(plan: Plan, report: RunReport, style: Style) -> list[RenderableType]:
    rows: list[_Row | None] = []
    for what, group in groupby(beside(plan, report), key=lambda row: row.what):
        # The bubble goes with the step.
        rows += [None] if what not in ("step_us", "bubble") else []
        rows += _compared(tuple(group))
    columns = [Column(header="", number=False), *(Column(header=name) for name in HEADERS)]
    return [table(columns, rows, style), *_notes(plan, report, style)]


def _compared(rows: Sequence[Beside]) -> list[_Row]:
    """The rows of one quantity; times in one unit."""
    texts: dict[str, Callable[[float], str]] = {"bubble": percent, "peak_bytes": format_bytes}
    text = texts.get(rows[0].what) or _times_text(rows)
    return [
        [
            row.label,
            text(row.predicted),
            Text(text(row.measured) + (" ! OVER" if row.is_over else ""), style="bold red" if row.is_over else ""),
            # A bubble is a share itself: a difference of shares in percent would be read as one of points.
            "" if row.what == "bubble" else row.difference,
        ]
        for row in rows
    ]


def _times_text(rows: Sequence[Beside]) -> Callable[[float], str]:
    scale = TimeScale.fitting(time for row in rows for time in (row.predicted, row.measured))
    return lambda time_us: f"{scale.text(time_us)} {scale.unit}" if time_us else NOTHING


def _notes(plan: Plan, report: RunReport, style: Style) -> list[Text]:
    notes = [Text("difference: measured against predicted", style="dim")]
    if len({run.replica for run in report.stages}) > 1:
        notes.append(Text(f"measured: {OF_REPLICAS}", style="dim"))
    reserve = max(stage.memory.reserve for stage in plan.stages)
    if reserve:
        notes.append(Text(f"peak memory is without the reserve of {format_bytes(reserve)}", style="dim"))
    if ran_other_stages(plan, report):
        count = len({run.index for run in report.stages})
        words = f"the run had other stages than the plan ({count}, planned {len(plan.stages)})"
        notes.append(flow([f"! {words}:", "the rows do not describe the same layers"], style, gap=" "))
    return notes
