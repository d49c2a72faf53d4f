"""Comparisons of plans, and sweeps over cluster sizes, as text."""

from rich.console import RenderableType
from rich.text import Text

from planner.core.judge.difference import Comparison, Difference
from planner.core.values.printable import printable
from planner.core.values.sweep import Sweep
from planner.show.terminal.rendering import BLANK, heading, render
from planner.show.terminal.style import Style
from planner.show.terminal.tables import fit_columns, terminal_table
from planner.show.views.comparison import (
    best_cluster_lines,
    comparison_notes,
    comparison_table,
    difference_table,
    sweep_table,
)


def plan_comparison_text(comparison: Comparison, style: Style) -> str:
    """Return a table of plans. For two plans, the differences of their stages follow."""
    parts: list[RenderableType] = [terminal_table(fit_columns(comparison_table(comparison), style))]
    for note in comparison_notes(comparison):
        parts += [BLANK, Text(printable(note))]
    if comparison.difference is not None:
        parts += [BLANK, *difference_parts(comparison.difference, style)]
    return render(style, *parts)


def difference_parts(difference: Difference, style: Style) -> list[RenderableType]:
    """Return a title and a table of each stage's memory and time in two plans."""
    title = heading(printable(f"against {difference.against}"))
    if not difference.recomputed:
        title.append(", whose numbers are as stored, because its profile is missing", "not bold")
    return [title, terminal_table(fit_columns(difference_table(difference), style))]


def sweep_text(sweep: Sweep, style: Style) -> str:
    """Return a table of a sweep, and the smallest, fastest and cheapest cluster."""
    cells = terminal_table(fit_columns(sweep_table(sweep), style))
    return render(style, cells, BLANK, *map(Text, best_cluster_lines(sweep)))
