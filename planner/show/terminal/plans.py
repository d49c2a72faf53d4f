"""Plans beside each other: a row for each, a bar of its samples per second, and two of them stage by stage."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from planner.core.judge.difference import ComparedPlan, Comparison, Difference
from planner.show.terminal.rendering import BLANK, heading, plain, render
from planner.show.terminal.style import Style
from planner.show.terminal.tables import drawn, fitted
from planner.show.views.comparison import comparison_table, difference_table
from planner.show.views.numbers import rate

_LONGEST_BAR = 40


def plans_text(comparison: Comparison, style: Style) -> str:
    """A table of all plans, a chart, and of two plans what differs from stage to stage."""
    shown = drawn(fitted(comparison_table(comparison), style), style)
    parts: list[RenderableType] = [shown, BLANK, *_chart(comparison.plans, style)]
    notes = [row.path for row in comparison.plans if not row.recomputed]
    if notes:
        said = f"numbers as written, the profile is not at hand: {', '.join(notes)}"
        parts += [BLANK, Text(plain(said, style))]
    if comparison.difference is not None:
        parts += [BLANK, *difference_parts(comparison.difference, style)]
    return render(style, *parts)


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


def difference_parts(difference: Difference, style: Style) -> list[RenderableType]:
    """Bytes and time per stage, before and now."""
    title = heading(plain(f"against {difference.against}", style))
    if not difference.recomputed:
        title.append(", whose numbers are as written: its profile is not at hand", "not bold")
    return [title, drawn(fitted(difference_table(difference), style), style)]
