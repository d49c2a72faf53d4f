"""Tables of the best plan for each number of micro-batches and for each schedule, with bars of step times."""

from rich.console import RenderableType

from planner.core.values.plan import Plan
from planner.show.terminal.rendering import heading, wrap_items
from planner.show.terminal.style import Style
from planner.show.terminal.tables import GAP, fit_columns, table_width, terminal_table
from planner.show.views.plan import (
    SHORT_MARK,
    frontier_has_replicas,
    frontier_table,
    schedules_table,
    short_search_note,
    untried_schedules_note,
)
from planner.show.views.table import Column, Table

_SHORTEST_BAR = 8
_LONGEST_BAR = 24
_FARTHEST = 4.0
"""Multiple of the best step time at which bars are cut off. A cut bar ends with an arrow."""


def frontier_parts(plan: Plan, style: Style) -> list[RenderableType]:
    """Return a table of the plans in `plan.frontier`; an empty list if there are none."""
    if not plan.frontier:
        return []
    several = frontier_has_replicas(plan)
    view = frontier_table(plan)
    unneeded = [] if several else ["replicas"]
    unneeded += [] if len({p.schedule for p in plan.frontier if p.fits}) > 1 else ["schedule"]
    view = fit_columns(_with_marks(view.without(*unneeded)), style)
    room = style.columns - table_width(view) - GAP
    bars = _bars(plan, min(room, _LONGEST_BAR)) if room >= _SHORTEST_BAR else ()
    view = Table(columns=(*view.columns, *bars))
    title = f"the best plan for each number of micro-batches{' and replicas' if several else ''}"
    return [heading(title), terminal_table(view), _legend(view, style)]


def schedules_parts(plan: Plan, style: Style) -> list[RenderableType]:
    """Return a table of the plans in `plan.schedules`; an empty list if there are none."""
    if not plan.schedules:
        return []
    view = fit_columns(schedules_table(plan), style)
    shown = terminal_table(view, {"schedule": (" ◀", ""), "step": (SHORT_MARK, "")})
    remarks = filter(None, ["◀ this plan", short_search_note(plan), untried_schedules_note(plan)])
    said = [wrap_items(remark.split(), style, gap=" ") for remark in remarks]
    return [heading("best plan of each schedule"), shown, *said]


def _with_marks(view: Table) -> Table:
    # The column becomes left-aligned text. Numbers are padded first, so that digits are aligned despite the marks.
    choice = view.column("micro_batches")
    width = max(map(len, choice.texts()))
    marks = [" ◀" if row in choice.marked else "" for row in range(len(choice.values))]
    texts = (f"{text:>{width}}{mark}" for text, mark in zip(choice.texts(), marks, strict=True))
    return view.with_texts("micro_batches", texts, "text").with_titles(micro_batches=choice.title.rjust(width))


def _bars(plan: Plan, room: int) -> tuple[Column, ...]:
    times_us = [point.step_us for point in plan.frontier if point.fits]
    if min(times_us, default=0.0) <= 0:
        return ()
    scale = room / min(max(times_us), min(times_us) * _FARTHEST)

    def bar(step_us: float) -> str:
        length = round(step_us * scale)
        return "█" * length if length <= room else "█" * (room - 1) + "→"

    values = tuple(bar(point.step_us) if point.fits else "" for point in plan.frontier)
    return (Column(name="bars", title="", values=values),)


def _legend(view: Table, style: Style) -> RenderableType:
    items = ["M micro-batches of b samples"]
    if view.column("micro_batches").marked:
        items.append("◀ this plan")
    if view.columns[-1].name == "bars":
        items.append("██ step")
    return wrap_items(items, style, gap="   ")
