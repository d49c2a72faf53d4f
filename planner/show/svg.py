"""Timeline of one step as SVG, for a file or for the printed HTML report.

Each device has a row, which ends with its bubble in percent. Sends are thin lines at the edge of the row. To limit the
size of the file, very thin neighboring boxes are merged.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Template

from planner.show.markup import element, escape_text, number
from planner.show.step import BY_LABEL, Span, StepTimeline
from planner.show.views.numbers import percent, row_noun, time_ticks
from planner.show.views.spans import (
    BUBBLE_WORDS,
    action_color_css,
    box_text_css,
    bubbles_of,
    legend_classes,
    micro_batch_text,
    recompute_style_class,
    span_style_class,
)

_WIDTH = 1200.0
_RIGHT = 52.0
"""Width of the right margin in pixels. The margin shows the bubble of each device, in percent."""
_AXIS = 30.0
_LEGEND, _LEGEND_LINE = 30.0, 18.0
_TALLEST, _LOWEST = 26.0, 7.0
_HEIGHT = 560.0
_LETTER = 5.6
"""Width of a letter or digit in a box's label, in pixels."""
_THIN = 1.5
"""Width in pixels below which a box is merged with its neighbor."""

_STYLE = Template("""\
.timeline{font:10px system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
.timeline text{fill:#1f2630}.timeline .axis text,.timeline .row text{font-size:11px}
.timeline .axis line,.timeline .rule{stroke:#d9dee5;stroke-width:1}
$kinds
.timeline .o{color:#8d949e}.timeline .s{color:#0d8f8c}.timeline .r{color:#9fd3cf}
.timeline path,.timeline rect{fill:currentColor}.timeline .row path{stroke:currentColor}.timeline rect.paper{fill:#fff}
.timeline .hatch{fill:none;stroke:#6d3b06;stroke-width:1.4}
$inks
@media (prefers-color-scheme:dark){.timeline rect.paper{fill:#14181f}.timeline text{fill:#e4e8ee}
.timeline .axis line,.timeline .rule{stroke:#343c48}.timeline .s{color:#37c0ba}
$inks}
""").substitute(kinds=action_color_css(".timeline "), inks=box_text_css())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    step: StepTimeline
    end_us: float
    left: float
    row: float

    def x(self, time_us: float) -> float:
        return self.left + time_us / self.end_us * (_WIDTH - _RIGHT - self.left)

    def y(self, device: int) -> float:
        return 6 + device * self.row

    @property
    def every(self) -> int:
        return 1 if self.row >= 11 else 4 if self.row >= 8 else 8

    @property
    def bottom(self) -> float:
        return self.y(self.step.num_devices)

    def lane(self, name: str) -> tuple[float, float]:
        edge = 3.0 if has_lanes(self.step) else 0.0
        if name == "compute":
            return self.row / 2, self.row - 2 * edge - 1
        return (edge / 2 if name == "send backward" else self.row - edge / 2), edge


def timeline_svg(step: StepTimeline, title: str) -> str:
    """Return the timeline of a step as SVG. `title` is the tooltip, and the label for screen readers."""
    name = row_noun(step.chunks)
    # Digits are about 6.2 wide at 11 px; the margin grows with the number of devices.
    frame = _Frame(
        step=step,
        end_us=max(step.end_us, 1e-9),
        left=14 + 6.4 * len(f"{name} {step.num_devices - 1}"),
        row=_row_height(step),
    )
    height = frame.bottom + _AXIS + _LEGEND + (len(_legend_rows(step)) - 1) * _LEGEND_LINE
    # A page may contain other pictures; only this one's patterns have this name.
    parts = [element("title", escape_text(title)), _pattern(), element("style", _STYLE)]
    parts += [_rect("paper", x=0, y=0, width=_WIDTH, height=height), _axis(frame)]
    by_device: defaultdict[int, list[Span]] = defaultdict(list)
    for span in step.spans:
        by_device[span.device].append(span)
    parts += [_row(frame, device, by_device[device], name) for device in range(step.num_devices)]
    parts += [_bubbles(frame), _legend(frame)]
    picture = element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        class_="timeline",
        viewBox=f"0 0 {number(_WIDTH)} {number(height)}",
        role="img",
        aria_label=title,
        width=_WIDTH,
        height=height,
    )
    return f"{picture}\n"


def has_lanes(step: StepTimeline) -> bool:
    """Return True if rows are high enough to draw transfers at their edges."""
    return _row_height(step) >= 11


def legend_entries(step: StepTimeline) -> list[tuple[str, str]]:
    """Return style class and label of each kind of box in the picture."""
    return legend_classes(step, has_sends=has_lanes(step))


def _row_height(step: StepTimeline) -> float:
    return min(_TALLEST, max(_LOWEST, _HEIGHT / step.num_devices))


def _pattern() -> str:
    line = element("path", d="M-1 1 1 -1M0 5 5 0M4 6 6 4", class_="hatch")
    pattern = element("pattern", line, id="again", width=5.0, height=5.0, patternUnits="userSpaceOnUse")
    return element("defs", pattern)


def _rect(look: str, *, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{look}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"/>'


def _axis(frame: _Frame) -> str:
    unit, ticks = time_ticks(frame.end_us, 10)
    bottom = frame.bottom
    marks = [
        f'<line x1="{number(frame.x(t.time_us))}" x2="{number(frame.x(t.time_us))}" y1="4" y2="{number(bottom + 4)}"/>'
        + element("text", t.label, x=frame.x(t.time_us), y=bottom + 17, text_anchor="middle")
        for t in ticks
    ]
    marks.append(element("text", unit, x=frame.left - 12, y=bottom + 17, text_anchor="end"))
    return element("g", *marks, class_="axis")


def _row(frame: _Frame, device: int, spans: Sequence[Span], name: str) -> str:
    y, height = frame.y(device), frame.row
    label = f"{name} {device}"
    parts = [element("title", label)]
    if device % frame.every == 0:
        middle = y + height / 2 + 3.8
        parts.append(element("text", label, x=frame.left - 8, y=middle, text_anchor="end"))
    # Boxes are drawn as thick lines, the shortest form.
    paths: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for look, x, end, lane in _boxes(frame, spans):
        # Leave a small gap between neighbors if there is space.
        width = max(0.2, end - x - min(0.7, 0.12 * (end - x)))
        paths[look, lane].append(f"M{number(x)} 0h{number(width)}")
    for (look, lane), drawn in paths.items():
        paint = 'style="stroke:url(#again)"' if look == "again" else f'class="{look}"'
        middle, tall = frame.lane(lane)
        place = f'transform="translate(0 {number(y + middle)})" stroke-width="{number(tall)}"'
        parts.append(f'<path {paint} {place} d="{"".join(drawn)}"/>')
    parts += _labels(frame, spans) if height >= 11 else []
    return element("g", *parts, class_="row")


def _bubbles(frame: _Frame) -> str:
    texts = [
        element("text", percent(share), x=_WIDTH - 6, y=frame.y(device) + frame.row / 2 + 3.8, text_anchor="end")
        for device, share in enumerate(bubbles_of(frame.step))
        if device % frame.every == 0
    ]
    return element("g", element("title", escape_text(BUBBLE_WORDS)), *texts, class_="bubbles")


_Box = tuple[str, float, float]
"""Box in a row: style class, left edge, right edge."""


def _boxes(frame: _Frame, spans: Sequence[Span]) -> Iterator[tuple[str, float, float, str]]:
    def lane(name: str, drawn: Iterator[_Box]) -> Iterator[tuple[str, float, float, str]]:
        for look, x, end in _merged(drawn):
            yield look, x, end, name

    x, count = frame.x, frame.step.num_devices
    computing = [s for s in spans if not s.kind.startswith("send")]
    yield from lane("compute", ((span_style_class(s, count), x(s.start_us), x(s.end_us)) for s in computing))
    again = (("again", x(s.start_us), x(s.start_us + s.recompute_us)) for s in computing if s.recompute_us > 0)
    yield from lane("compute", again)
    for kind in ("send backward", "send forward") if has_lanes(frame.step) else ():
        yield from lane(kind, (("s", x(s.start_us), x(s.end_us)) for s in spans if s.kind == kind))


def _merged(boxes: Iterator[_Box]) -> Iterator[_Box]:
    pending: _Box | None = None
    for look, x, end in boxes:
        if pending is not None:
            touches = look == pending[0] and x - pending[2] < _THIN / 2 and end - x < _THIN
            if touches:
                pending = (look, pending[1], end)
                continue
            yield pending
        pending = (look, x, end)
    if pending is not None:
        yield pending


def _labels(frame: _Frame, spans: Sequence[Span]) -> Iterator[str]:
    # A box has its number only if the longest number fits, so that equal boxes look equal.
    longest = len(str(frame.step.micro_batches - 1)) + (2 if frame.step.chunks > 1 else 0)
    for span in spans:
        kind = BY_LABEL.get(span.kind)
        if kind is None:
            continue
        room = frame.x(span.end_us) - frame.x(span.start_us) - 3
        text = micro_batch_text(span, frame.step)
        if room < _LETTER * longest:
            continue
        if room >= _LETTER * (longest + 1.4):
            text = kind.letter + text
        x = frame.x((span.start_us + span.end_us) / 2)
        # A number on hatching is hard to read, so it is placed on the part that is not recomputed.
        if span.recompute_us > 0:
            x, room = frame.x((span.start_us + span.recompute_us + span.end_us) / 2), room * 0.7
        y = frame.y(span.device) + frame.row / 2 + 3.6
        place = f'x="{number(x, 1)}" y="{number(y, 1)}" text-anchor="middle"'
        yield f'<text class="on-{kind.letter.lower()}" {place}>{text}</text>'


def _legend_rows(step: StepTimeline) -> list[list[tuple[str, str]]]:
    items = [*legend_entries(step), ("", "blank: idle"), ("", f"at the right: {BUBBLE_WORDS}")]
    rows: list[list[tuple[str, str]]] = [[]]
    for item in items:
        if sum(map(_legend_width, [*rows[-1], item])) > _WIDTH - 2 * _RIGHT:
            rows.append([])
        rows[-1].append(item)
    return rows


def _legend_width(item: tuple[str, str]) -> float:
    look, words = item
    return (44 if look else 20) + 5.4 * len(words)


def _legend(frame: _Frame) -> str:
    parts: list[str] = []
    for n, row in enumerate(_legend_rows(frame.step)):
        x, y = frame.left, frame.bottom + _AXIS + 2 + n * _LEGEND_LINE
        for item in row:
            look, words = item
            parts += _sample(frame, look, x, y)
            parts.append(element("text", escape_text(words), x=x + (24 if look else 0), y=y + 9.5))
            x += _legend_width(item)
    return element("g", *parts, class_="legend")


def _sample(frame: _Frame, look: str, x: float, y: float) -> Iterator[str]:
    if look:
        yield _rect(recompute_style_class(frame.step) if look == "again" else look, x=x, y=y, width=18, height=11)
    if look == "again":
        yield f'<rect style="fill:url(#again)" x="{number(x)}" y="{number(y)}" width="18" height="11"/>'
