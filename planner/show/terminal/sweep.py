"""Many clusters: a row for each, a heat map over devices and memory, and which is the smallest that trains."""

from rich.text import Text

from planner.core.values.sweep import Sweep, SweepCell
from planner.core.values.units import counted, exact_bytes_option, format_bytes, format_us
from planner.show.terminal.fitting import Rows, fitting_table
from planner.show.terminal.rendering import BLANK, heading, render
from planner.show.terminal.style import Style
from planner.show.views.numbers import NOTHING, percent, rate
from planner.show.views.words import schedule_name

__all__ = ["best_words", "sweep_rows", "sweep_text"]

_NONE = {"none": "does not fit", "unknown": "no plan in time"}
_SHADES = (153, 117, 75, 33, 27)
"""From pale to deep blue, of the 256 colours; the number stands on each."""
_DARK_FROM = 3
"""From this shade on the number is white."""


def sweep_text(sweep: Sweep, style: Style) -> str:
    """The table of all cells, the heat map, and the answer on the last lines."""
    drawn = fitting_table(sweep_rows(sweep), style, words=(2, 3, 9), goes=(7, 8, 3, 2), group=len(sweep.memory_bytes))
    return render(style, drawn, BLANK, *_heat_map(sweep, style), BLANK, *map(Text, best_words(sweep)))


def sweep_rows(sweep: Sweep) -> Rows:
    """Names of the columns, and a row per cell."""
    names = ("devices", "memory", "schedule", "plan", "step", "samples/s", "per device", "bubble", "peak", "")
    return names, [_row(cell) for cell in sweep.cells]


def best_words(sweep: Sweep) -> list[str]:
    """Which cluster is the smallest, the fastest, and the one that makes most of its devices."""
    if sweep.smallest is None:
        return ["none of these clusters trains this model"]
    smallest = sweep.cells[sweep.smallest]
    with_plan = [cell for cell in sweep.cells if cell.plan is not None]
    # Of clusters that do the same the smallest.
    fastest = max(with_plan, key=lambda c: (_per_s(c), -c.devices, -c.memory_bytes))
    thriftiest = max(with_plan, key=lambda c: (c.samples_per_device_s, -c.devices, -c.memory_bytes))
    return [
        f"smallest that trains: {_cluster(smallest)}, {rate(_per_s(smallest))} samples/s",
        f"fastest: {_cluster(fastest)}, {rate(_per_s(fastest))} samples/s",
        f"most per device: {_cluster(thriftiest)}, {rate(thriftiest.samples_per_device_s)} samples/s each",
    ]


def _cluster(cell: SweepCell) -> str:
    return f"{counted(cell.devices, 'device')} with {exact_bytes_option(cell.memory_bytes)}"


def _per_s(cell: SweepCell) -> float:
    return cell.plan.predicted.samples_per_s if cell.plan is not None else 0.0


def _row(cell: SweepCell) -> tuple[str, ...]:
    size = exact_bytes_option(cell.memory_bytes)
    plan = cell.plan
    if plan is None:
        return str(cell.devices), size, *(NOTHING,) * 7, _NONE[cell.status]
    used = plan.num_devices * plan.replicas
    notes = [f"{cell.devices - used} unused"] if used < cell.devices else []
    if cell.status == "feasible":
        notes.append(f"gap {percent(plan.solver.gap)}")
    return (
        str(cell.devices),
        size,
        schedule_name(plan.schedule),
        f"{counted(len(plan.stages), 'stage')} x {counted(plan.micro_batches, 'micro-batch', 'es')}",
        format_us(plan.predicted.step_us),
        rate(plan.predicted.samples_per_s),
        rate(cell.samples_per_device_s),
        percent(plan.predicted.bubble),
        format_bytes(max(plan.device_bytes())),
        ", ".join(notes),
    )


def _heat_map(sweep: Sweep, style: Style) -> list[Text]:
    """Samples per second and device: the deeper, the more. Without colours blocks say it."""
    values = {(c.devices, c.memory_bytes): c.samples_per_device_s for c in sweep.cells if c.plan is not None}
    least, most = min(values.values(), default=0.0), max(values.values(), default=0.0)
    width = max(8, *(len(exact_bytes_option(cap)) for cap in sweep.memory_bytes)) + 2
    label = max(len(str(count)) for count in sweep.devices)
    lines = [heading("samples per second and device"), Text(" " * (label + 9))]
    for cap in sweep.memory_bytes:
        lines[-1].append(f"{exact_bytes_option(cap):>{width}}")
    for count in sweep.devices:
        line = Text(f"{count:>{label}} device{'s' if count > 1 else ' '} ")
        for cap in sweep.memory_bytes:
            value = values.get((count, cap))
            line.append_text(_square(value, least, most, width, style))
        lines.append(line)
    return lines


def _square(value: float | None, least: float, most: float, width: int, style: Style) -> Text:
    if value is None:
        return Text(f"{NOTHING:>{width}}")
    share = (value - least) / (most - least) if most > least else 1.0
    shade = min(len(_SHADES) - 1, int(share * len(_SHADES)))
    if style.color:
        ink = "color(231)" if shade >= _DARK_FROM else "color(16)"
        return Text.assemble("  ", (f"{rate(value):>{width - 2}}", f"{ink} on color({_SHADES[shade]})"))
    fill = style.glyphs.shades[min(shade, len(style.glyphs.shades) - 1)]
    return Text(f"{fill + ' ' + rate(value):>{width}}")
