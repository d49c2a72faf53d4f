"""Section with charts of the best plan for each number of micro-batches: step time, bubble and peak memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.core.values.plan import FrontierPoint, Plan
from planner.core.values.units import format_bytes, format_us
from planner.show.html.parts import (
    Section,
    chart_figure,
    chart_line,
    chart_point,
    chart_text,
    collapsible,
    values_table,
)
from planner.show.markup import element
from planner.show.views.numbers import NOTHING, percent
from planner.show.views.plan import frontier_has_replicas, frontier_table
from planner.show.views.table import Table

_COLUMNS = ("micro_batches", "micro_batch_size", "step", "samples", "bubble", "peak", "recompute", "devices")
_MOST_LABELS = 9
_FEW = 4
"""Largest number of points of a chart that all have a value label; with more points, only the plan's point has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlottedQuantity:
    """Quantity that one chart shows, such as the step time."""

    title: str
    value_of: Callable[[FrontierPoint], float]
    format_value: Callable[[float], str]
    limit: float = 0.0
    """Upper limit of the quantity, drawn as a line; 0 for none."""


def frontier_section(plan: Plan) -> Section:
    """Return charts and a table of the plans in `plan.frontier`, which must not be empty."""
    points = plan.frontier
    several = frontier_has_replicas(plan)
    names = [f"{p.micro_batches}, R {p.replicas}" if several else str(p.micro_batches) for p in points]
    numbers = frontier_table(plan)
    chosen = [row in numbers.column("micro_batches").marked for row in range(len(points))]
    memory_limit = max(plan.inputs.memory_bytes)
    figures = (
        _PlottedQuantity(title="step time", value_of=lambda p: p.step_us, format_value=format_us),
        _PlottedQuantity(title="bubble", value_of=lambda p: p.bubble, format_value=percent),
        _PlottedQuantity(
            title="peak memory", value_of=lambda p: p.peak_bytes, format_value=format_bytes, limit=memory_limit
        ),
    )
    charts = [_chart(shown, points, names, chosen) for shown in figures]
    unfit = [name for name, point in zip(names, points, strict=True) if not point.fits]
    lead = "The best plan for each number of micro-batches M; the diamond marks this plan."
    if unfit:
        lead += f" No plan fits with M = {', '.join(unfit)} (×)."  # noqa: RUF001 - as drawn
    body = element("div", *charts, class_="charts") + collapsible("Numbers", _numbers(numbers, names, points))
    return Section(anchor="trade-off", title="Trade-off over M", lead=lead, body=body)


def _chart(
    shown: _PlottedQuantity, points: Sequence[FrontierPoint], names: Sequence[str], chosen: Sequence[bool]
) -> str:
    of, text, title = shown.value_of, shown.format_value, shown.title
    most = max((of(point) for point in points if point.fits), default=0.0)
    # A limit far above all points would flatten them.
    limit = shown.limit if shown.limit <= 2 * most else 0.0
    top = max(most, limit) or 1.0
    places = [(n + 0.5) / len(points) * 100 for n in range(len(points))]

    def y(value: float) -> float:
        return 18 + (1 - value / top) * 110

    parts = [chart_line("axis", (0, 100), (128, 128))]
    if limit:
        parts.append(chart_line("limit", (0, 100), (y(limit), y(limit))))
        title += f" (dashed: limit {text(limit)})"
    fitting = [(x, y(of(p))) for x, p in zip(places, points, strict=True) if p.fits]
    parts += [chart_line("curve", *zip(begin, end, strict=True)) for begin, end in pairwise(fitting)]
    every = -(-len(points) // _MOST_LABELS)
    labelled = len(points) <= _FEW
    for n, (x, point) in enumerate(zip(places, points, strict=True)):
        if point.fits:
            value, is_chosen = text(of(point)), chosen[n]
            parts += _point(x, y(of(point)), names[n], value=value, chosen=is_chosen, labelled=labelled or is_chosen)
        else:
            tip = f"M = {names[n]}: no plan fits"
            parts.append(chart_text(x, 124, "\u00d7", "middle", style_class="unfit", tip=tip))
        if n % every == 0 or chosen[n]:
            parts.append(chart_text(x, 145, names[n], "middle", style_class="chosen" if chosen[n] else None))
    return chart_figure(title, *parts, height=150.0, label=f"{title} over M")


def _point(x: float, y: float, name: str, *, value: str, chosen: bool, labelled: bool) -> list[str]:
    tip = f"M = {name}: {value}"
    side = "start" if x < 15 else "end" if x > 85 else "middle"
    written = [chart_text(x, max(11, y - 9), value, side, style_class="chosen" if chosen else None)] if labelled else []
    return [chart_point(x, y, tip, chosen=chosen), *written]


def _numbers(shown: Table, names: Sequence[str], points: Sequence[FrontierPoint]) -> str:
    speeds = (f"{p.samples_per_s:,.1f}" if p.fits else NOTHING for p in points)
    numbers = shown.pick(*_COLUMNS).with_titles(micro_batch_size="samples each", devices="devices")
    numbers = numbers.with_texts("micro_batches", names).with_texts("samples", speeds)
    return values_table(numbers, marks={"micro_batches": " ◆"})
