"""Memory of every stage against its cap, as stacked bars."""

from collections.abc import Sequence
from math import floor

from rich.console import RenderableType
from rich.text import Text

from planner.core.plan import Stage, StageMemory
from planner.core.units import format_bytes
from planner.show.numbers import percent
from planner.show.rendering import flow, heading, padded, render
from planner.show.style import Style

__all__ = ["KINDS", "memory_parts", "memory_text", "share_of_cap"]

KINDS = tuple(name for name, _ in StageMemory().items())

# Blues and purple for what the model weighs, warm colours for what the micro-batches add, greys for the rest.
_COLORS = {
    "parameters": 25,
    "gradients": 37,
    "optimizer": 97,
    "buffers": 248,
    "in_flight": 172,
    "transfer": 220,
    "working": 71,
    "reserve": 242,
}

_ENOUGH_TO_SEE = 0.25


def memory_text(stages: Sequence[Stage], style: Style) -> str:
    """A bar per stage, stacked by kind of memory, with the stage's cap marked, and a legend.

    Where every stage needs far less than the largest cap, the bars are drawn to the largest need instead.
    """
    return render(style, *memory_parts(stages, style))


def memory_parts(stages: Sequence[Stage], style: Style) -> list[RenderableType]:
    """What `memory_text` is made of."""
    need = max(stage.memory.total for stage in stages)
    cap = max(stage.memory_bytes for stage in stages)
    to_caps = need >= cap * _ENOUGH_TO_SEE
    labels = _columns([_label(stage) for stage in stages])
    numbers = _numbers(stages, style)
    room = style.columns - len(labels[0]) - max(number.cell_len for number in numbers) - 4
    scale = room / max(1, need, cap if to_caps else 0)
    title = heading("memory per stage")
    if not to_caps:
        title.append(f", bars to the largest need ({format_bytes(need)}): the caps lie far to the right", "not bold")
    rows = [
        Text.assemble(label, " ", _bar(stage, scale, room, style), "  ", number)
        for stage, label, number in zip(stages, labels, numbers, strict=True)
    ]
    return [title, *rows, _legend(stages, style)]


def share_of_cap(stage: Stage, *, decimals: int = 0) -> str:
    """How much of its cap a stage needs."""
    if not stage.memory_bytes:
        return "-"
    return percent(stage.memory.total / stage.memory_bytes, decimals=decimals)


def _label(stage: Stage) -> str:
    return f"stage {stage.index}"


def _columns(texts: Sequence[str], *, right: bool = False) -> list[str]:
    width = max(map(len, texts))
    return [text.rjust(width) if right else padded(text, width) for text in texts]


def _numbers(stages: Sequence[Stage], style: Style) -> list[Text]:
    needs = _columns([format_bytes(stage.memory.total) for stage in stages], right=True)
    caps = _columns([format_bytes(stage.memory_bytes) for stage in stages], right=True)
    shares = _columns([share_of_cap(stage) for stage in stages], right=True)
    lines = []
    for stage, need, cap, share in zip(stages, needs, caps, shares, strict=True):
        line = Text(f"{need} of {cap} {style.glyphs.dot} {share}")
        if _is_over(stage):
            line.append(" ! OVER", "bold red")
        lines.append(line)
    return lines


def _is_over(stage: Stage) -> bool:
    return stage.memory.total > stage.memory_bytes


def _bar(stage: Stage, scale: float, room: int, style: Style) -> Text:
    # Edges are rounded, not widths: so the parts add up to the bar, and equal sums end in the same column.
    bar = Text()
    edge = 0
    for name, size in stage.memory.items():
        edge += size
        end = min(room, _rounded(edge * scale))
        bar.append(_fill(name, style) * (end - len(bar)), _look(name))
    bar.append(" " * (room + 1 - len(bar)))
    mark = stage.memory_bytes * scale
    if mark < room + 0.5:
        return _with_mark(bar, _rounded(mark), stage, style)
    return bar


def _with_mark(bar: Text, column: int, stage: Stage, style: Style) -> Text:
    mark = Text(style.glyphs.cap, style="bold red" if _is_over(stage) else "bold")
    return Text.assemble(bar[:column], mark, bar[column + 1 :])


def _legend(stages: Sequence[Stage], style: Style) -> Text:
    # The numbers of one stage are enough to see what weighs most: the one nearest to its cap.
    fullest = max(stages, key=lambda stage: stage.memory.total / max(1, stage.memory_bytes))
    sizes = dict(fullest.memory.items())
    items: list[Text | str] = [f"stage {fullest.index}:"]
    for name in KINDS:
        if any(getattr(stage.memory, name) for stage in stages):
            words = f" {name.replace('_', ' ')} {format_bytes(sizes[name])}"
            items.append(Text.assemble((_fill(name, style), _look(name)), words))
    return flow(items, style, indent="  ") if len(items) > 1 else Text()


def _fill(name: str, style: Style) -> str:
    return style.glyphs.memory[KINDS.index(name)]


def _look(name: str) -> str:
    # Ink and paper alike: in colour the fill shows as a solid block, copied out of the terminal it is still there.
    return f"color({_COLORS[name]}) on color({_COLORS[name]})"


def _rounded(value: float) -> int:
    return floor(value + 0.5)
