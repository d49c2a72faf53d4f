"""Plans beside each other: a row for each, a bar of its samples per second, and two of them stage by stage."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from planner.core.judge.comparison import ComparedPlan, Comparison
from planner.core.judge.difference import Difference, StageDifference
from planner.core.values.units import format_bytes, format_us
from planner.show.terminal.fitting import Rows, fitting_table
from planner.show.terminal.rendering import BLANK, heading, plain, render
from planner.show.terminal.style import Style
from planner.show.views.numbers import NOTHING, difference, percent, rate
from planner.show.views.words import schedule_name

__all__ = ["comparison_rows", "difference_parts", "difference_rows", "plans_text"]

_LONGEST_BAR = 40


def plans_text(comparison: Comparison, style: Style) -> str:
    """A table of all plans, a chart, and of two plans what differs from stage to stage."""
    shown = fitting_table(comparison_rows(comparison), style, words=(0, 1), goes=(9, 6, 7, 3, 1, 4))
    parts: list[RenderableType] = [shown, BLANK, *_chart(comparison.plans, style)]
    notes = [row.path for row in comparison.plans if not row.recomputed]
    if notes:
        said = f"numbers as written, the profile is not at hand: {', '.join(notes)}"
        parts += [BLANK, Text(plain(said, style))]
    if comparison.difference is not None:
        parts += [BLANK, *difference_parts(comparison.difference, style)]
    return render(style, *parts)


def comparison_rows(comparison: Comparison) -> Rows:
    """What is told of each plan."""
    names = ("plan", "schedule", "devices", "M x b", "step", "samples/s", "per device", "bubble", "peak", "cap", "")
    return names, [_row(row, comparison.plans[0]) for row in comparison.plans]


def _row(row: ComparedPlan, first: ComparedPlan) -> tuple[str, ...]:
    plan, predicted = row.plan, row.plan.predicted
    devices = plan.num_devices * plan.replicas
    against = difference(first.plan.predicted.samples_per_s, predicted.samples_per_s) if row is not first else ""
    return (
        row.path,
        schedule_name(plan.schedule),
        str(devices),
        f"{plan.micro_batches} x {plan.micro_batch_size}",
        format_us(predicted.step_us),
        rate(predicted.samples_per_s),
        rate(predicted.samples_per_s / devices),
        percent(predicted.bubble),
        format_bytes(max(plan.device_bytes())),
        format_bytes(min(stage.memory_bytes for stage in plan.stages)),
        against if row.fits else f"{against} OVER".strip(),
    )


def _chart(plans: Sequence[ComparedPlan], style: Style) -> list[RenderableType]:
    most = max(row.plan.predicted.samples_per_s for row in plans) or 1.0
    labels = [plain(row.path, style) for row in plans]
    width = max(map(len, labels))
    room = min(_LONGEST_BAR, max(8, style.columns - width - 14))
    lines = [heading("samples per second")]
    for label, row in zip(labels, plans, strict=True):
        per_s = row.plan.predicted.samples_per_s
        bar = style.glyphs.bar * max(1, round(per_s / most * room))
        lines.append(Text(f"{label:<{width}}  {bar:<{room}}  {rate(per_s)}"))
    return list(lines)


def difference_parts(found: Difference, style: Style) -> list[RenderableType]:
    """Bytes and time per stage, before and now."""
    title = heading(plain(f"against {found.against}", style))
    if not found.recomputed:
        title.append(", whose numbers are as written: its profile is not at hand", "not bold")
    return [title, fitting_table(difference_rows(found), style, words=(0,), goes=(1, 4))]


def difference_rows(found: Difference) -> Rows:
    """A row per stage, and one for the whole step."""
    names = ("", "memory before", "memory now", "difference", "time before", "time now", "difference")
    rows = [_stage_row(stage) for stage in found.stages]
    step = (
        "step",
        format_bytes(found.peak_bytes_before),
        format_bytes(found.peak_bytes),
        _more_bytes(found.peak_bytes_before, found.peak_bytes),
        format_us(found.step_us_before),
        format_us(found.step_us),
        difference(found.step_us_before, found.step_us),
    )
    return names, [*rows, step]


def _stage_row(stage: StageDifference) -> tuple[str, ...]:
    both = stage.us_before is not None and stage.us is not None
    return (
        f"stage {stage.index}",
        NOTHING if stage.bytes_before is None else format_bytes(stage.bytes_before),
        NOTHING if stage.bytes is None else format_bytes(stage.bytes),
        _more_bytes(stage.bytes_before, stage.bytes),
        NOTHING if stage.us_before is None else format_us(stage.us_before),
        NOTHING if stage.us is None else format_us(stage.us),
        difference(stage.us_before or 0.0, stage.us or 0.0) if both else NOTHING,
    )


def _more_bytes(before: int | None, now: int | None) -> str:
    if before is None or now is None:
        return NOTHING
    return f"{'+' if now >= before else '-'}{format_bytes(abs(now - before))}"
