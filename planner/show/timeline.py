"""The timeline of one step (Gantt chart): a row per stage, stage 0 on top, time to the right, idle left blank.

    stage 0 F0░░F1░░F2░░            B0▓▓▓▓▓▓B1▓▓▓▓▓▓B2▓▓▓▓▓▓
    stage 1     F0░░F1░░F2░░B0▓▓▓▓▓▓B1▓▓▓▓▓▓B2▓▓▓▓▓▓

A letter begins each box and the micro-batch follows, where there is room; without room the fill alone tells forward
from backward. Boxes are exactly to scale: start and end are rounded to columns, so boxes never overlap and a box
thinner than a column may vanish.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, floor, log10

from rich.console import RenderableType
from rich.text import Text

from planner.core.simulate import Event
from planner.core.units import format_us
from planner.show.numbers import TimeScale, percent
from planner.show.rendering import flow, heading, render
from planner.show.style import Glyphs, Style

__all__ = ["Box", "Scale", "boxes_of", "idle_share", "timeline_parts", "timeline_text"]

# Blue and orange: told apart by all eyes, and by brightness alone. Neighbours take turns in shade.
_PAPER = {"F": (25, 32), "B": (214, 172)}
_INK = {"F": 231, "B": 16}

_MIN_TICK_COLUMNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Columns for times: 0 to `total_us` lie on `columns`."""

    total_us: float
    columns: int

    def column(self, time_us: float) -> int:
        """The column boundary nearest to `time_us`."""
        # Half always up (Python's `round` goes to even): equal durations may then differ by one column at most.
        return floor(time_us * self.columns / self.total_us + 0.5)

    def room(self, duration_us: float) -> int:
        """Columns that a box of that duration has wherever it lies."""
        return floor(duration_us * self.columns / self.total_us + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One forward or backward, from column `start` to before column `end`."""

    kind: str
    micro_batch: int
    start: int
    end: int
    room: int
    """Columns that its label may take: the same for equal durations, however their edges were rounded."""


def timeline_text(events: Sequence[Event], num_stages: int, style: Style) -> str:
    """The timeline of `events` with its time axis and legend. Transfers are left out."""
    return render(style, *timeline_parts(events, num_stages, style))


def timeline_parts(events: Sequence[Event], num_stages: int, style: Style) -> list[RenderableType]:
    """What `timeline_text` is made of."""
    computing = [event for event in events if event.kind in _PAPER]
    total_us = max((event.end_us for event in computing), default=0.0)
    if total_us <= 0:
        return [heading("timeline"), "nothing takes any time"]
    margin = len(f"stage {num_stages - 1} ")
    scale = Scale(total_us=total_us, columns=style.columns - margin)
    title = heading("timeline of one step").append(f", {format_us(total_us)} up to the last backward", "not bold")
    stages = [boxes_of(computing, stage, scale) for stage in range(num_stages)]
    rows = [
        Text(f"stage {stage}".ljust(margin)).append_text(_row(boxes, style.glyphs))
        for stage, boxes in enumerate(stages)
    ]
    legend = _legend(style, idle=idle_share(computing, num_stages), numbered=any(map(_has_number, chain(*stages))))
    return [title, *rows, *_axis(scale, margin, style.glyphs), legend]


def boxes_of(events: Sequence[Event], stage: int, scale: Scale) -> list[Box]:
    """The boxes of one stage, from left to right; none overlap."""
    mine = sorted((e for e in events if e.stage == stage and e.kind in _PAPER), key=lambda e: e.start_us)
    return [
        Box(
            kind=event.kind,
            micro_batch=event.micro_batch,
            start=scale.column(event.start_us),
            end=scale.column(event.end_us),
            room=scale.room(event.end_us - event.start_us),
        )
        for event in mine
    ]


def idle_share(events: Sequence[Event], num_stages: int) -> float:
    """Share of the stages' time between the start and the last backward in which they compute nothing."""
    busy_us = sum(event.end_us - event.start_us for event in events if event.kind in _PAPER)
    total_us = max(event.end_us for event in events if event.kind in _PAPER)
    return 1 - busy_us / (num_stages * total_us)


def _row(boxes: Sequence[Box], glyphs: Glyphs) -> Text:
    row = Text()
    for box in boxes:
        row.append(" " * (box.start - len(row)))
        label = _label(box)
        fill = glyphs.forward if box.kind == "F" else glyphs.backward
        row.append(label, _look(box, _INK[box.kind], bold=True))
        row.append(fill * (box.end - box.start - len(label)), _look(box))
    return row


def _has_number(box: Box) -> bool:
    return box.room >= len(f"{box.kind}{box.micro_batch}")


def _label(box: Box) -> str:
    if _has_number(box):
        return f"{box.kind}{box.micro_batch}"[: box.end - box.start]
    return box.kind if box.room >= 2 else ""


def _look(box: Box, ink: int | None = None, *, bold: bool = False) -> str:
    # Ink and paper alike make the fill a solid block in colour, and leave it there for who copies the text.
    paper = _PAPER[box.kind][box.micro_batch % 2]
    return f"{'bold ' if bold else ''}color({paper if ink is None else ink}) on color({paper})"


def _axis(scale: Scale, margin: int, glyphs: Glyphs) -> list[Text]:
    step_us = _nice(scale.total_us * _MIN_TICK_COLUMNS / scale.columns)
    unit = TimeScale.fitting([scale.total_us])
    line = [glyphs.rule] * scale.columns
    labels = [" "] * scale.columns
    for n in range(floor(scale.total_us / step_us) + 1):
        column = min(scale.column(n * step_us), scale.columns - 1)
        line[column] = glyphs.tick if n else glyphs.origin
        label = f"{n * step_us / unit.factor:g}"
        first = max(0, min(column - (len(label) - 1) // 2, scale.columns - len(label)))
        labels[first : first + len(label)] = label
    return [
        Text(" " * margin + "".join(line), style="dim"),
        Text(unit.unit.rjust(margin - 1) + " " + "".join(labels)),
    ]


def _nice(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power: float = 10.0 ** ceil(log10(least))
    return next(power * part for part in (0.2, 0.5, 1.0) if power * part >= least * (1 - 1e-9))


def _legend(style: Style, *, idle: float, numbered: bool) -> Text:
    samples: list[Text | str] = []
    for kind, fill, words in (
        ("F", style.glyphs.forward, "forward"),
        ("B", style.glyphs.backward, "backward with any recomputation"),
    ):
        box = Box(kind=kind, micro_batch=0, start=0, end=3, room=3)
        sample = Text(kind, style=_look(box, _INK[kind], bold=True)).append(fill * 2, _look(box))
        samples.append(Text.assemble(sample, f" {words}"))
    if numbered:
        samples.append("number: micro-batch")
    return flow([*samples, f"blank: idle {percent(idle)}"], style, gap="   ")
