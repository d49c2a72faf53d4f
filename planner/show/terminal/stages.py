"""The stages of a plan as a table, and what it says about them below."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import groupby
from re import fullmatch

from rich.table import Table
from rich.text import Text

from planner.core.values.plan import Plan, Stage
from planner.core.values.units import counted, format_bytes
from planner.show.terminal.memory import share_of_cap
from planner.show.terminal.rendering import Column, flow, plain, table
from planner.show.terminal.style import Style
from planner.show.views.numbers import TimeScale, layer_range

__all__ = ["has_unlike_devices", "recomputed_layers", "stage_table"]

_MEDIUM = 76
_WIDE = 96
_DEVICE_COLUMN = 10
_MOST_LINES = 3

_Column = tuple[Column, Callable[[Stage], str | Text]]


def stage_table(plan: Plan, style: Style) -> Table:
    """A row per stage, the slowest one marked; with its device where that is not simply the one of the same number."""
    columns = list(_columns(plan, style))
    rows = [[text(stage) for _, text in columns] for stage in plan.stages]
    return table([column for column, _ in columns], rows, style)


def has_unlike_devices(plan: Plan) -> bool:
    """Whether it matters which device a stage runs on."""
    inputs = plan.inputs
    placed = any(stage.device is not None for stage in plan.stages)
    return placed or len(set(inputs.memory_bytes)) > 1 or len({1.0, *inputs.speeds}) > 1


def recomputed_layers(plan: Plan, style: Style) -> list[Text]:
    """A line (or a few) for every stage that recomputes single layers: which."""
    return [_recomputed(stage, style) for stage in plan.stages if stage.recompute == "layers"]


def _columns(plan: Plan, style: Style) -> Iterator[_Column]:
    scale = TimeScale.fitting(time for s in plan.stages for time in (s.forward_us, s.backward_us))
    with_device = plan.chunks > 1 or has_unlike_devices(plan)
    taken = _DEVICE_COLUMN if with_device else 0
    yield Column(header="stage", number=False), lambda s: _index(s, plan, style)
    if with_device:
        yield Column(header="device", number=False), lambda s: _device(s, plan, style)
    yield Column(header="layers", number=False), lambda s: plain(layer_range(s.first, s.last, s.layers), style)
    yield Column(header="recompute", number=False), _recompute
    yield Column(header=f"forward\n{scale.unit}"), lambda s: scale.text(s.forward_us)
    yield Column(header=f"backward\n{scale.unit}"), lambda s: scale.text(s.backward_us)
    # What goes in few columns stands in the bars below the table as well.
    if style.has_room_for(_MEDIUM + taken):
        yield Column(header="memory" if plan.chunks == 1 else "part of\npeak"), lambda s: format_bytes(s.memory.total)
    # A cap is for all chunks of a device together: that is for the bars.
    if plan.chunks == 1 and style.has_room_for(_WIDE + taken):
        yield Column(header="cap"), lambda s: format_bytes(s.memory_bytes)
        yield Column(header="share"), _share


def _index(stage: Stage, plan: Plan, style: Style) -> str:
    slowest = len(plan.stages) > 1 and stage.index == plan.predicted.bottleneck_stage
    return f"{stage.index} {style.glyphs.mark}" if slowest else str(stage.index)


def _device(stage: Stage, plan: Plan, style: Style) -> str:
    device, speeds = plan.device_of(stage), plan.inputs.speeds
    speed = speeds[device] if device < len(speeds) else 1.0
    return str(device) if speed == 1 else f"{device} ({speed:g}{style.glyphs.times})"


def _recompute(stage: Stage) -> str:
    return f"{len(stage.recomputed)} of {counted(stage.layers, 'layer')}" if stage.recomputed else stage.recompute


def _share(stage: Stage) -> Text:
    over = stage.memory.total > stage.memory_bytes
    share = share_of_cap(stage.memory.total, stage.memory_bytes)
    return Text(f"{share}{' !' if over else ''}", style="bold red" if over else "")


def _recomputed(stage: Stage, style: Style) -> Text:
    names = _names(stage, style)

    def told(kept: int) -> Text:
        left = len(names) - kept
        items = [f"{name}," for name in names[: kept - 1]] + names[kept - 1 : kept]
        more = [f"and {left} more"] if left else []
        return flow([f"stage {stage.index} recomputes", *items, *more], style, gap=" ", indent="  ")

    def lines(kept: int) -> int:
        return told(kept).plain.count("\n") + 1

    # A pipe cuts nothing.
    if not style.wrap or lines(len(names)) <= _MOST_LINES:
        return told(len(names))
    return told(max(1, bisect_right(range(1, len(names)), _MOST_LINES, key=lines)))


def _names(stage: Stage, style: Style) -> list[str]:
    """The recomputed layers; three and more whose names count on become one, as `block_4 … block_6 (3)`."""
    names = stage.recomputed
    if len(names) == stage.layers:
        return [plain(layer_range(stage.first, stage.last, stage.layers), style)]
    counting = groupby(enumerate(map(_numbered, names)), key=lambda item: (*item[1][::2], item[1][1] - item[0]))
    told: list[str] = []
    for _, group in counting:
        run = [names[place] for place, _ in group]
        told += [layer_range(run[0], run[-1], len(run))] if len(run) > 2 else run
    return [plain(name, style) for name in told]


def _numbered(name: str) -> tuple[str, int, str]:
    """What stands before the last number in a name, the number, and what follows it."""
    match = fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
    return (match[1], int(match[2]), match[3]) if match else (name, -1, "")
