"""The trade-off over the number of micro-batches: the best plan for each of them, the chosen one marked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import RenderableType

from planner.core.values.plan import FrontierPoint, Plan
from planner.core.values.units import format_bytes
from planner.show.terminal.rendering import Column, flow, heading, table
from planner.show.terminal.style import Style
from planner.show.views.numbers import NOTHING, TimeScale, percent, rate
from planner.show.views.words import schedule_name

__all__ = ["frontier_parts"]

_GAP = 2
_SHORTEST_BAR = 8
_LONGEST_BAR = 24
_FARTHEST = 4.0
"""Times the best step time that the longest bar stands for; what takes longer runs off it."""

_NO_PLAN = "no plan fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One column: how a point's value is written, and how soon the column goes where there is no room."""

    header: str
    text: Callable[[FrontierPoint], str]
    otherwise: str | None = NOTHING
    """Stands there where no plan fits; None if the value is known even then."""
    goes: int = 0
    """The larger, the sooner; 0 stays in any case."""
    number: bool = True

    def cell(self, point: FrontierPoint) -> str:
        return self.text(point) if point.fits or self.otherwise is None else self.otherwise


def frontier_parts(plan: Plan, style: Style) -> list[RenderableType]:
    """A row per number of micro-batches (and of replicas); nothing where the plan has no such figures."""
    points = plan.frontier
    if not points:
        return []
    figures = _fitting([_choice(plan, style), *_figures(points)], points, style)
    room = style.columns - _width(figures, points) - _GAP
    bars = _bars(points, min(room, _LONGEST_BAR), style) if room >= _SHORTEST_BAR else []
    rows = [[figure.cell(point) for figure in (*figures, *bars)] for point in points]
    columns = [Column(header=figure.header, number=figure.number) for figure in (*figures, *bars)]
    return [heading(_title(points)), table(columns, rows, style), _legend(plan, style, bars=bool(bars))]


def _title(points: Sequence[FrontierPoint]) -> str:
    return f"the best plan for each number of micro-batches{' and replicas' if _several_replicas(points) else ''}"


def _several_replicas(points: Sequence[FrontierPoint]) -> bool:
    return any(point.replicas != 1 for point in points)


def _is_chosen(point: FrontierPoint, plan: Plan) -> bool:
    return (point.micro_batches, point.replicas) == (plan.micro_batches, plan.replicas)


def _choice(plan: Plan, style: Style) -> _Figure:
    # Digits below each other whether a mark follows or not: to the right before the mark, as text to the left.
    width = max(len(str(point.micro_batches)) for point in plan.frontier)

    def text(point: FrontierPoint) -> str:
        return f"{point.micro_batches:>{width}}{f' {style.glyphs.mark}' if _is_chosen(point, plan) else ''}"

    return _Figure(header="M".rjust(width), text=text, otherwise=None, number=False)


def _figures(points: Sequence[FrontierPoint]) -> Iterator[_Figure]:
    scale = TimeScale.fitting(point.step_us for point in points)
    schedules = {point.schedule for point in points if point.fits}
    if _several_replicas(points):
        yield _Figure(header="replicas", text=lambda p: str(p.replicas), otherwise=None)
    yield _Figure(header="b", text=lambda p: str(p.micro_batch_size), otherwise=None)
    if len(schedules) > 1:
        yield _Figure(header="schedule", text=lambda p: schedule_name(p.schedule), goes=1, number=False)
    yield _Figure(header="devices" if "interleaved" in schedules else "stages", text=lambda p: str(p.devices), goes=2)
    yield _Figure(header=f"step\n{scale.unit}", text=lambda p: scale.text(p.step_us), otherwise=_NO_PLAN)
    yield _Figure(header="samples/s", text=lambda p: rate(p.samples_per_s), goes=4)
    yield _Figure(header="bubble", text=lambda p: percent(p.bubble), goes=3)
    yield _Figure(header="peak per\ndevice", text=lambda p: format_bytes(p.peak_bytes))
    yield _Figure(header="recompute", text=lambda p: percent(p.recompute_share), goes=5)


def _fitting(figures: Sequence[_Figure], points: Sequence[FrontierPoint], style: Style) -> list[_Figure]:
    """Those for which there is room: the first to go are left out first."""
    kept = list(figures)
    while not style.has_room_for(_width(kept, points)) and any(figure.goes for figure in kept):
        kept.remove(max(kept, key=lambda figure: figure.goes))
    return kept


def _width(figures: Sequence[_Figure], points: Sequence[FrontierPoint]) -> int:
    lines = [[*figure.header.split("\n"), *map(figure.cell, points)] for figure in figures]
    return sum(max(map(cell_len, column)) for column in lines) + _GAP * (len(figures) - 1)


def _bars(points: Sequence[FrontierPoint], room: int, style: Style) -> list[_Figure]:
    best_us = min((point.step_us for point in points if point.fits), default=0.0)
    worst_us = max((point.step_us for point in points if point.fits), default=0.0)
    if best_us <= 0:
        return []
    columns = room / min(worst_us, best_us * _FARTHEST)

    def text(point: FrontierPoint) -> str:
        length = round(point.step_us * columns)
        if length <= room:
            return style.glyphs.bar * length
        return style.glyphs.bar * (room - len(style.glyphs.arrow)) + style.glyphs.arrow

    return [_Figure(header="", text=text, otherwise="", number=False)]


def _legend(plan: Plan, style: Style, *, bars: bool) -> RenderableType:
    items = ["M micro-batches of b samples"]
    if any(_is_chosen(point, plan) for point in plan.frontier):
        items.append(f"{style.glyphs.mark} this plan")
    if bars:
        items.append(f"{style.glyphs.bar * 2} step")
    return flow(items, style, gap="   ")
