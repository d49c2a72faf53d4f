"""Comparisons of plans, and sweeps over cluster sizes, as text."""

from rich.console import RenderableType
from rich.text import Text

from planner.core.judge.difference import Comparison, Difference
from planner.core.values.printable import printable
from planner.core.values.sweep import Sweep
from planner.core.values.units import exact_bytes_option
from planner.show.terminal.rendering import BLANK, heading, render
from planner.show.terminal.style import Style
from planner.show.terminal.tables import fit_columns, terminal_table
from planner.show.views.comparison import best_cluster_lines, comparison_table, difference_table, sweep_table
from planner.show.views.numbers import NOTHING, rate_text


def plan_comparison_text(comparison: Comparison, style: Style) -> str:
    """Return a table of plans. For two plans, the differences of their stages follow."""
    parts: list[RenderableType] = [terminal_table(fit_columns(comparison_table(comparison), style))]
    stored = [row.path for row in comparison.plans if not row.recomputed]
    if stored:
        note = f"numbers are as stored, because the profile is missing: {', '.join(stored)}"
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


_SHADES = (153, 117, 75, 33, 27)
"""Background colors of the heat map, from pale to deep blue, as indices of the 256 colors."""
_DARK_FROM = 3
"""Index of the first background color on which numbers are white."""


def sweep_text(sweep: Sweep, style: Style) -> str:
    """Return a table of a sweep, a heat map, and the smallest, fastest and cheapest cluster."""
    cells = terminal_table(fit_columns(sweep_table(sweep), style))
    return render(style, cells, BLANK, *_heat_map(sweep, style), BLANK, *map(Text, best_cluster_lines(sweep)))


def _heat_map(sweep: Sweep, style: Style) -> list[Text]:
    values = {(c.devices, c.memory_bytes): c.samples_per_device_s for c in sweep.cells if c.plan is not None}
    least, most = min(values.values(), default=0.0), max(values.values(), default=0.0)
    width = max(8, *(len(exact_bytes_option(limit)) for limit in sweep.memory_bytes)) + 2
    label = max(len(str(count)) for count in sweep.devices)
    lines = [heading("samples per second and device"), Text(" " * (label + 9))]
    for limit in sweep.memory_bytes:
        lines[-1].append(f"{exact_bytes_option(limit):>{width}}")
    for count in sweep.devices:
        line = Text(f"{count:>{label}} device{'s' if count > 1 else ' '} ")
        for limit in sweep.memory_bytes:
            value = values.get((count, limit))
            line.append_text(_square(value, style, least=least, most=most, width=width))
        lines.append(line)
    return lines


def _square(value: float | None, style: Style, *, least: float, most: float, width: int) -> Text:
    if value is None:
        return Text(f"{NOTHING:>{width}}")
    share = (value - least) / (most - least) if most > least else 1.0
    shade = min(len(_SHADES) - 1, int(share * len(_SHADES)))
    if style.color:
        ink = "color(231)" if shade >= _DARK_FROM else "color(16)"
        return Text.assemble("  ", (f"{rate_text(value):>{width - 2}}", f"{ink} on color({_SHADES[shade]})"))
    fill = "·░▒▓█"[shade]
    return Text(f"{fill + ' ' + rate_text(value):>{width}}")
