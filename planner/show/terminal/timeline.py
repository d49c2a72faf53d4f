"""Timeline of one step (Gantt chart): a row per device with device 0 on top, time to the right, idle time blank.

    stage 0 F0░░F1░░F2░░            B0▓▓▓▓▓▓B1▓▓▓▓▓▓B2▓▓▓▓▓▓ 25.0 %
    stage 1     F0░░F1░░F2░░B0▓▓▓▓▓▓B1▓▓▓▓▓▓B2▓▓▓▓▓▓          0.0 %

A box begins with the letter of its action and the number of its micro-batch, if they fit. `F0.1` is micro-batch 0 on
chunk 1 of a device. A box thinner than a column may vanish. A row ends with its bubble: the idle share of the time from
its first box to its last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import floor

from rich.console import RenderableType
from rich.text import Text

from planner.core.cost.simulate import Event
from planner.core.schedule.kinds import KINDS, WEIGHT_BACKWARD, ActionKind
from planner.core.values.units import format_us
from planner.show.step import REDONE
from planner.show.terminal.rendering import heading, wrap_items
from planner.show.terminal.style import Style
from planner.show.views.numbers import percent, row_noun, time_ticks
from planner.show.views.spans import BUBBLE_WORDS, HUES, bubble_of

_BY_LETTER: Mapping[str, ActionKind] = {kind.letter: kind for kind in KINDS.values()}
"""Kind of action for each letter. An event whose `kind` is not one of these letters is a transfer."""

_FILLS = ("░▒", "▓█", "▓█", "─═")
"""Fill characters of boxes, by kind of action; chunks of a device use the characters in turn.

Backwards and input-gradient passes have the same characters. Their labels differ: `B` and `I`."""

_MIN_TICK_COLUMNS = 10
_REMARK = " with any recomputation"
BUBBLE_COLUMNS = len(" 17.9 %")
"""Width of the text for the bubble at the end of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisScale:
    """Scale of a time axis, which maps times from 0 to `total_us` to columns of text."""

    total_us: float
    columns: int

    def column(self, time_us: float) -> int:
        """Return the column boundary nearest to a time."""
        # Half always rounds up (Python's `round` rounds to even), so equal durations differ by at most one column.
        return floor(time_us * self.columns / self.total_us + 0.5)

    def box_columns(self, duration_us: float) -> int:
        """Return the width of a box with this duration in columns, rounded down."""
        return floor(duration_us * self.columns / self.total_us + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBox:
    """Box of one action, from column `start` to column `end - 1`."""

    kind: str
    """Letter of the kind of action."""
    micro_batch: int
    start: int
    end: int
    columns: int
    """Number of columns available for the label."""
    chunk: int | None = None
    """Chunk of the action on its device; None if every device has one stage."""

    @property
    def name(self) -> str:
        """Label of the box: `F3`, or `F3.1` for chunk 1 if devices have several chunks."""
        return self.short_name + ("" if self.chunk is None else f".{self.chunk}")

    @property
    def short_name(self) -> str:
        """Label of the box without its chunk, such as `F3`."""
        return f"{self.kind}{self.micro_batch}"


def timeline_parts(events: Sequence[Event], num_devices: int, style: Style) -> list[RenderableType]:
    """Return title, rows, axis and legend of the timeline of a step, without transfers."""
    computing = [event for event in events if event.kind in _BY_LETTER]
    total_us = max((event.end_us for event in computing), default=0.0)
    if total_us <= 0:
        return [heading("timeline"), "nothing takes any time"]
    chunks = max(event.stage for event in computing) // num_devices + 1
    # With one stage per device, rows have the stages' names, as in tables.
    noun = row_noun(chunks)
    margin = len(f"{noun} {num_devices - 1} ")
    scale = AxisScale(total_us=total_us, columns=style.columns - margin - BUBBLE_COLUMNS)
    title = heading("timeline of one step").append(f", {format_us(total_us)} up to the last backward", "not bold")
    # If steps overlap, the picture's idle share is not the plan's bubble, which is relative to the time between steps.
    idle: float | None = idle_share(computing, num_devices)
    if any(event.kind == WEIGHT_BACKWARD.letter for event in computing):
        idle = None
        title.append(", which overlaps with the next step", "not bold")
    devices = [boxes_of(computing, device, scale, num_devices) for device in range(num_devices)]
    rows = [
        Text(f"{noun} {device}".ljust(margin)).append_text(_row(boxes, scale, _bubble(computing, device)))
        for device, boxes in enumerate(devices)
    ]
    legend = _legend(style, idle=idle, boxes=list(chain(*devices)), chunks=chunks)
    return [title, *rows, *_axis(scale, margin), legend]


def boxes_of(events: Sequence[Event], device: int, scale: AxisScale, num_devices: int) -> list[TimelineBox]:
    """Return the boxes of a device's actions in the timeline, from left to right, without overlaps.

    Args:
        events: Simulated events of the step.
        device: Index of the device.
        scale: Scale of the time axis.
        num_devices: Number of devices.
    """
    computed = sorted((e for e in events if e.device == device and e.kind in _BY_LETTER), key=lambda e: e.start_us)
    several = any(event.stage >= num_devices for event in events)
    return [
        TimelineBox(
            kind=event.kind,
            micro_batch=event.micro_batch,
            start=scale.column(event.start_us),
            end=scale.column(event.end_us),
            columns=scale.box_columns(event.end_us - event.start_us),
            chunk=event.stage // num_devices if several else None,
        )
        for event in computed
    ]


def idle_share(events: Sequence[Event], num_devices: int) -> float:
    """Return the share of all devices' time that is idle, up to the end of the last backward."""
    busy_us = sum(event.end_us - event.start_us for event in events if event.kind in _BY_LETTER)
    total_us = max(event.end_us for event in events if event.kind in _BY_LETTER)
    return 1 - busy_us / (num_devices * total_us)


def _bubble(events: Sequence[Event], device: int) -> str:
    share = bubble_of((event.start_us, event.end_us) for event in events if event.device == device)
    return percent(share).rjust(BUBBLE_COLUMNS)


def _row(boxes: Sequence[TimelineBox], scale: AxisScale, bubble: str) -> Text:
    row = Text()
    for box in boxes:
        row.append(" " * (box.start - len(row)))
        label = _label(box)
        row.append(label, _look(box, _BY_LETTER[box.kind].terminal_ink, bold=True))
        row.append(_fill(box) * (box.end - box.start - len(label)), _look(box))
    return row.append(" " * (scale.columns - len(row)) + bubble)


def _fill(box: TimelineBox) -> str:
    fills = _FILLS[list(_BY_LETTER).index(box.kind)]
    return fills[(box.chunk or 0) % len(fills)]


def _has_number(box: TimelineBox) -> bool:
    return box.columns >= len(box.name)


def _has_short_number(box: TimelineBox) -> bool:
    # Some fill must remain visible to show the chunk.
    return box.chunk is not None and len(box.short_name) < box.columns < len(box.name)


def _label(box: TimelineBox) -> str:
    if _has_number(box):
        return box.name[: box.end - box.start]
    if _has_short_number(box):
        return box.short_name
    return box.kind if box.columns >= 2 else ""


def _look(box: TimelineBox, ink: int | None = None, *, bold: bool = False) -> str:
    # Text and background have the same color, so the fill looks solid, but copied text still shows its characters.
    hues = _BY_LETTER[box.kind].terminal
    paper = hues[(box.chunk or 0) % len(hues)][box.micro_batch % 2]
    return f"{'bold ' if bold else ''}color({paper if ink is None else ink}) on color({paper})"


def _axis(scale: AxisScale, margin: int) -> list[Text]:
    unit, ticks = time_ticks(scale.total_us, scale.columns / _MIN_TICK_COLUMNS)
    line = ["─"] * scale.columns
    labels = [" "] * scale.columns
    for tick in ticks:
        column = min(scale.column(tick.time_us), scale.columns - 1)
        line[column] = "┼" if tick.time_us else "├"
        first = max(0, min(column - (len(tick.label) - 1) // 2, scale.columns - len(tick.label)))
        labels[first : first + len(tick.label)] = tick.label
    return [
        Text(" " * margin + "".join(line), style="dim"),
        Text(unit.rjust(margin - 1) + " " + "".join(labels)),
    ]


def _legend(style: Style, *, idle: float | None, boxes: Sequence[TimelineBox], chunks: int) -> Text:
    kinds = [kind for kind in KINDS.values() if any(box.kind == kind.letter for box in boxes)]
    samples: list[Text | str] = [
        Text.assemble(_sample(kind, 0), f" {kind.label}{_REMARK if kind.label in REDONE else ''}") for kind in kinds
    ]
    samples += [
        Text.assemble(*(_sample(kind, chunk) for kind in kinds), f" chunk {chunk}")
        for chunk in range(1, min(chunks, HUES))
    ]
    if any(map(_has_number, boxes)):
        samples.append("number: micro-batch" + (".chunk" if chunks > 1 else ""))
    elif any(map(_has_short_number, boxes)):
        samples.append("number: micro-batch")
    said = ["blank: idle" if idle is None else f"blank: idle {percent(idle)}", f"at the right: {BUBBLE_WORDS}"]
    return wrap_items([*samples, *said], style, gap="   ")


def _sample(kind: ActionKind, chunk: int) -> Text:
    box = TimelineBox(kind=kind.letter, micro_batch=0, start=0, end=3, columns=3, chunk=chunk)
    sample = Text(kind.letter, style=_look(box, kind.terminal_ink, bold=True))
    return sample.append(_fill(box) * 2, _look(box))
