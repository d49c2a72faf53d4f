"""Run reports and results of `verify` as text: measurements of training, compared with the plan's predictions.

Times are compared per stage. Peak memory is compared per device, because the chunks of a device share its allocator.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.core.judge.calibration import timed_steps_us
from planner.core.judge.verification import ComparedFigure, Quantity, Verification, compared_figures
from planner.core.values.plan import Plan
from planner.core.values.printable import printable
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes, format_rate, format_us, pluralize
from planner.show.terminal.rendering import BLANK, heading, render, wrap_items
from planner.show.terminal.style import Style
from planner.show.terminal.tables import TextColumn, rich_table, terminal_table
from planner.show.views.measured import (
    HEADERS,
    OF_DEVICES,
    OF_REPLICAS,
    WAITING,
    difference_words,
    figure_label,
    has_only_device_peaks,
    is_over,
    pipeline_words,
    ran_other_stages,
    run_table,
    times_warning,
)
from planner.show.views.numbers import NOTHING, TimeUnit, percent, rate_text, row_noun

_Row = list[str | Text]
_TEXTS: Mapping[Quantity, Callable[[float], str]] = {"bubble": percent, "peak_bytes": format_bytes}
"""Functions that return a quantity as text, for quantities that are not times."""


def run_text(report: RunReport, plan: Plan | None, style: Style) -> str:
    """Return the measurements of a run as text, compared with its plan if it is known.

    Args:
        report: Report of the run.
        plan: Plan of the run; None if it is not known.
        style: Style of the output.
    """
    parts: list[RenderableType] = [heading(f"run of {len(report.losses)} steps on {pipeline_words(report, plan)}")]
    parts += [_facts(report, style), _steps(report, style)]
    if warning := times_warning(report):
        parts.append(wrap_items(f"! {warning}".split(), style, gap=" "))
    parts.append(BLANK)
    if plan is not None:
        parts += [*_comparison(plan, report, style), BLANK]
    if plan is None or any(stage.idle_us for stage in report.stages):
        parts += _measured(report, style)
        if plan is not None and has_only_device_peaks(plan, report):
            parts.append(wrap_items(OF_DEVICES.split(), style, gap=" "))
    return render(style, *parts)


def plan_and_run_text(plan: Plan, report: RunReport, style: Style) -> str:
    """Return a table of predicted and measured times and memory.

    Args:
        plan: The plan.
        report: Report of a run of the plan.
        style: Style of the output.
    """
    return render(style, *_comparison(plan, report, style))


def _facts(report: RunReport, style: Style) -> Text:
    device, environment = report.device, report.environment
    facts = [
        printable(f"{device.kind} {device.name}".strip()),
        printable(environment.dtype),
        printable(f"torch {environment.torch}") if environment.torch else "",
        "" if report.seed is None else f"seed {report.seed}",
    ]
    if report.losses:
        facts.append(f"loss {report.losses[0]:.4g} → {report.losses[-1]:.4g}")
    return wrap_items(filter(None, facts), style, gap=" · ")


def _steps(report: RunReport, style: Style) -> Text:
    steps = timed_steps_us(report)
    if not steps:
        return Text("no step was timed")
    scale = TimeUnit.fitting(steps)
    spread = f"fastest {scale.text(min(steps))}, slowest {scale.text(max(steps))}"
    warm_up = (
        f"after {pluralize(report.warmup_steps, 'warm-up step')}"
        if len(report.step_us) > len(steps)
        else "with warm-up"
    )
    words = [
        f"step {scale.text(median(steps))} {scale.unit}, median of {pluralize(len(steps), 'step')} {warm_up};",
        spread,
    ]
    speeds = report.samples_per_s[-len(steps) :]
    if speeds:
        words.append(f"({rate_text(median(speeds))} samples/s)")
    return wrap_items(words, style, gap=" ")


def _measured(report: RunReport, style: Style) -> list[RenderableType]:
    view = run_table(report)
    view = view.without(*(name for name in WAITING if not any(view.column(name).values)))
    parts: list[RenderableType] = [terminal_table(view)]
    if any(column.per == "step" for column in view.columns):
        said = "transfer and idle are per step; other times are per micro-batch"
        parts.append(wrap_items(said.split(), style, gap=" "))
    return parts


def _comparison(plan: Plan, report: RunReport, style: Style) -> list[RenderableType]:
    rows: list[_Row | None] = []
    for quantity, group in groupby(compared_figures(plan, report), key=lambda row: row.what):
        # The bubble is in the same group of rows as the step time.
        rows += [None] if quantity not in ("step_us", "bubble") else []
        rows += _compared(tuple(group), plan)
    return [_table(rows), *_notes(plan, report, style)]


def _table(rows: Sequence[_Row | None], *more: TextColumn) -> Table:
    columns = [TextColumn(header="", number=False), *(TextColumn(header=name) for name in HEADERS), *more]
    return rich_table(columns, rows)


def _compared(rows: Sequence[ComparedFigure], plan: Plan) -> Iterator[_Row]:
    scale = TimeUnit.fitting(time for row in rows for time in (row.predicted, row.measured))

    def time(time_us: float) -> str:
        return f"{scale.text(time_us)} {scale.unit}" if time_us else NOTHING

    for row in rows:
        text = _TEXTS.get(row.what, time)
        over = (" ! OVER", "bold red") if is_over(row, plan) else ("", "")
        measured = Text(text(row.measured) + over[0], style=over[1])
        # A bubble is a percentage. Its relative difference would be misread as a difference in percentage points.
        off = "" if row.what == "bubble" else difference_words(row)
        yield [figure_label(row, row_noun(plan.chunks)), text(row.predicted), measured, off]


def _notes(plan: Plan, report: RunReport, style: Style) -> list[Text]:
    notes = [Text("difference: measured relative to predicted", style="dim")]
    if len({run.replica for run in report.stages}) > 1:
        notes.append(Text(f"measured: {OF_REPLICAS}", style="dim"))
    reserve = max(stage.memory.reserve for stage in plan.stages)
    if reserve:
        notes.append(Text(f"peak memory excludes the reserve of {format_bytes(reserve)}", style="dim"))
    if ran_other_stages(plan, report):
        count = len({run.index for run in report.stages})
        words = f"the run had other stages than the plan ({count}, planned {len(plan.stages)})"
        notes.append(wrap_items([f"! {words}:", "the rows do not describe the same layers"], style, gap=" "))
    return notes


def verification_text(verification: Verification, style: Style) -> str:
    """Return the result of `verify`: a table of figures with a verdict for each, notes, and the calibration."""
    rows: list[_Row | None] = []
    for _, group in groupby(verification.compared, key=lambda row: row.what):
        # There is a gap before each quantity, except before the row after the step time, which is the bubble.
        rows += [None] if len(rows) > 1 else []
        rows += map(_judged, group)
    said = [*verification.notes, *([] if verification.proof is None else [str(verification.proof)])]
    notes = [wrap_items(note.split(), style, gap=" ") for note in said]
    shown = _table(rows, TextColumn(header=""))
    return render(style, shown, *notes, BLANK, _calibrated(verification, style), _answer(verification, style))


def _judged(row: ComparedFigure) -> _Row:
    text = _TEXTS.get(row.what, format_us)
    off = NOTHING if row.what == "bubble" else difference_words(row)
    said = {None: Text(""), True: Text("ok", style="green"), False: Text("! OFF", style="bold red")}[row.agrees]
    return [
        figure_label(row, "device"),
        text(row.predicted),
        text(row.measured) if row.measured else NOTHING,
        off,
        said,
    ]


def _calibrated(verification: Verification, style: Style) -> Text:
    calibration = verification.calibration
    facts = [f"compute x {calibration.compute:.3g}", f"executor {format_us(calibration.overhead_us)}"]
    if calibration.link is not None:
        speed = f"{format_rate(calibration.link.bytes_per_s)}, " if calibration.link.bytes_per_s else ""
        facts.append(f"link {speed}{format_us(calibration.link.latency_us)}")
    facts.append(f"reserve {format_bytes(calibration.reserve_bytes)}")
    return wrap_items(["calibrated:", *(f"{fact};" for fact in facts[:-1]), facts[-1]], style, gap=" ")


def _answer(verification: Verification, style: Style) -> Text:
    allowed = verification.tolerance
    said = [
        f"(step within {percent(allowed.step, decimals=0)},",
        f"memory predicted at most {percent(allowed.memory_below, decimals=0)} too low,",
        f"{percent(allowed.memory_above, decimals=0)} too high,",
        f"or {format_bytes(allowed.memory_slack_bytes)} off)",
    ]
    words = ("as predicted", "bold green") if verification.agrees else ("not as predicted", "bold red")
    return wrap_items([Text(words[0], style=words[1]), *said], style, gap=" ")
