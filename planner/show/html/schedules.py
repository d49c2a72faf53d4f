"""Section that compares schedules: a chart of bubble and memory, and a table."""

from collections.abc import Sequence

from planner.core.schedule import schedule_of
from planner.core.values.plan import FrontierPoint, Plan
from planner.core.values.units import format_bytes
from planner.show.html.parts import Section, chart_figure, chart_line, chart_point, chart_text, remark, values_table
from planner.show.views.numbers import percent
from planner.show.views.plan import SHORT_MARK, schedules_table, short_search_note, untried_schedules_note

_TOP, _BOTTOM = 16.0, 210.0
_LEFT, _RIGHT = 8.0, 78.0
"""Left and right edge of the plot in percent of the width; names of points use the space to the right of it."""
_LINE = 13.0
"""Smallest vertical distance between the names of points, in pixels."""


def schedules_section(plan: Plan) -> Section | None:
    """Return the comparison of schedules; None if the plan has none."""
    points = [point for point in plan.schedules if point.fits]
    if not points:
        return None
    lead = "The best plan found under each schedule; the diamond marks this plan."
    body = _scatter(plan, points) + values_table(schedules_table(plan), marks={"schedule": " ◆", "step": SHORT_MARK})
    words = "; ".join(filter(None, (short_search_note(plan), untried_schedules_note(plan))))
    return Section(
        anchor="schedules", title="Trade-off over schedules", lead=lead, body=body + (remark(words) if words else "")
    )


def _scatter(plan: Plan, points: Sequence[FrontierPoint]) -> str:
    widest = max(point.bubble for point in points) or 1.0
    highest, limit = max(point.peak_bytes for point in points) or 1, max(plan.inputs.memory_bytes)
    # A limit far above all points would flatten them.
    top = max(highest, limit, 1) if limit <= 2 * highest else highest

    def x(bubble: float) -> float:
        return _LEFT + bubble / widest * (_RIGHT - _LEFT)

    def y(size: float) -> float:
        return _BOTTOM - size / top * (_BOTTOM - _TOP)

    parts = [chart_line("axis", (_LEFT, 100), (_BOTTOM, _BOTTOM)), chart_line("axis", (_LEFT, _LEFT), (_TOP, _BOTTOM))]
    parts += [chart_text(x(share), _BOTTOM + 15, percent(share), "middle") for share in (0.0, widest)]
    title = "bubble (right) and peak of the fullest device (up)"
    if limit <= top:
        parts.append(chart_line("limit", (_LEFT, 100), (y(limit), y(limit))))
        title += f"; dashed: memory limit {format_bytes(limit)}"
    written: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.peak_bytes):
        point_at = x(point.bubble), y(point.peak_bytes)
        name, name_at = schedule_of(point.schedule).title, _free(point_at, written)
        written.append(name_at)
        tip = f"{name}: bubble {percent(point.bubble)}, {format_bytes(point.peak_bytes)}"
        parts.append(chart_point(*point_at, tip, chosen=point.schedule == plan.schedule))
        parts.append(chart_text(point_at[0] + 1.2, name_at[1] + 4, name, "start"))
    return chart_figure(title, *parts, height=_BOTTOM + 22, label=f"{title} of {len(points)} schedules")


def _free(position: tuple[float, float], written: Sequence[tuple[float, float]]) -> tuple[float, float]:
    x, y = position
    for other_x, other_y in sorted(written, key=lambda other: other[1]):
        if abs(other_x - x) < 20 and abs(other_y - y) < _LINE:
            y = other_y + _LINE
    return x, y
