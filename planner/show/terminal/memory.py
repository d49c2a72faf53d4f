"""Memory of every device of a pipeline: stacked bars with the memory limit."""

from collections.abc import Sequence
from math import floor

from rich.console import RenderableType
from rich.text import Text

from planner.core.values.plan import Stage
from planner.core.values.units import format_bytes
from planner.show.terminal.rendering import heading, wrap_items
from planner.show.terminal.style import Style
from planner.show.views.memory import (
    COMPONENTS,
    DeviceMemory,
    component_title,
    device_memory,
    fullest_device,
    present_components,
)
from planner.show.views.numbers import row_noun

# Blue and purple for the model's memory, warm colors for memory of micro-batches, gray for other components.
_COLORS = {
    "parameters": 25,
    "gradients": 37,
    "optimizer": 97,
    "buffers": 248,
    "casts": 31,
    "in_flight": 172,
    "transfer": 220,
    "working": 71,
    "reserve": 242,
}
_FILLS = "█▓▒▀▚░▄▌·"
"""Fill of each component of memory, in the order of `StageMemory.items()`."""

_OTHER_COLOR = 132
"""Color of a component that has none in `_COLORS`."""

_ENOUGH_TO_SEE = 0.25
"""Share of the memory limit. If no peak reaches it, bars are scaled to the largest peak instead of the limit."""


def memory_renderables(devices: Sequence[Sequence[Stage]], style: Style, *, gpus: int = 1) -> list[RenderableType]:
    """Return a title, a stacked bar of memory components per device, and a legend.

    Args:
        devices: Stages of each device.
        style: Style of the output.
        gpus: Number of GPUs that together run each stage (tensor parallelism). The bars show the memory of one GPU.
    """
    needs = device_memory(devices)
    need, limit = max(n.total_bytes for n in needs), max(n.limit_bytes for n in needs)
    to_limits = need >= limit * _ENOUGH_TO_SEE
    margin = max(len(n.label) for n in needs)
    numbers = _numbers(needs)
    room = style.columns - margin - max(number.cell_len for number in numbers) - 4
    scale = room / max(1, need, limit if to_limits else 0)
    title = heading(f"memory per {row_noun(len(devices[0]))}")
    if gpus > 1:
        title.append(f", on each of its {gpus} GPUs", "not bold")
    if not to_limits:
        title.append(f", bars scaled to the largest peak ({format_bytes(need)}), far below the limits", "not bold")
    rows = [
        Text.assemble(n.label.ljust(margin), " ", _bar(n, scale, room), "  ", number)
        for n, number in zip(needs, numbers, strict=True)
    ]
    return [title, *rows, _legend(needs, style)]


def _numbers(needs: Sequence[DeviceMemory]) -> list[Text]:
    texts = [(format_bytes(n.total_bytes), format_bytes(n.limit_bytes), n.share) for n in needs]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for need, row in zip(needs, texts, strict=True):
        total, limit, share = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        over = (" ! OVER", "bold red") if need.is_over else ""
        lines.append(Text.assemble(f"{total} of {limit} · {share}", over))
    return lines


def _bar(need: DeviceMemory, scale: float, room: int) -> Text:
    # Edges are rounded, not widths, so that bars of equal memory end in the same column.
    bar = Text()
    edge = 0
    for name, size in need.memory.items():
        edge += size
        end = min(room, _rounded(edge * scale))
        bar.append(_fill(name) * (end - len(bar)), _look(name))
    bar.append(" " * (room + 1 - len(bar)))
    if need.limit_bytes * scale >= room + 0.5:
        return bar
    column = _rounded(need.limit_bytes * scale)
    mark = Text("│", style="bold red" if need.is_over else "bold")
    return Text.assemble(bar[:column], mark, bar[column + 1 :])


def _legend(needs: Sequence[DeviceMemory], style: Style) -> Text:
    nearest = fullest_device(needs)
    sizes = dict(nearest.memory.items())
    items: list[Text | str] = [f"{nearest.label}:"]
    for kind in present_components(needs):
        words = f" {component_title(kind)} {format_bytes(sizes[kind])}"
        items.append(Text.assemble((_fill(kind), _look(kind)), words))
    return wrap_items(items, style, indent="  ") if len(items) > 1 else Text()


def _fill(name: str) -> str:
    return _FILLS[COMPONENTS.index(name) % len(_FILLS)]


def _look(name: str) -> str:
    # Text and background have the same color, so the fill looks solid, but copied text still shows its characters.
    color = _COLORS.get(name, _OTHER_COLOR)
    return f"color({color}) on color({color})"


def _rounded(value: float) -> int:
    return floor(value + 0.5)
