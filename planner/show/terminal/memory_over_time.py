"""Memory of every device over a step, drawn below the timeline with the same time axis."""

from rich.console import RenderableType
from rich.text import Text

from planner.core.values.plan import Plan
from planner.core.values.units import format_bytes
from planner.show.step import StepTimeline
from planner.show.terminal.rendering import heading
from planner.show.terminal.style import Style
from planner.show.terminal.timeline import BUBBLE_COLUMNS
from planner.show.views.memory import share_of_limit
from planner.show.views.memory_over_time import memory_over_time
from planner.show.views.numbers import row_noun

_ENOUGH_TO_SEE = 0.25
_LEVELS = "▁▂▃▄▅▆▇█"


def memory_over_time_parts(plan: Plan, step: StepTimeline, style: Style) -> list[RenderableType]:
    """Return the memory of each device over the step, as a row of bars per device.

    A bar of full height is the device's memory limit, or the largest peak if no device needs a quarter of its limit.

    Args:
        plan: The plan.
        step: One step of the plan.
        style: Style of the output.

    Returns:
        A title, then a row per device, which ends with the peak as a share of the limit.
    """
    if step.pipeline_us <= 0:
        return []
    called, limits = row_noun(plan.chunks), [chunks[0].memory_bytes for chunks in plan.by_device()]
    margin = len(f"{called} {plan.num_devices - 1} ")
    columns = style.columns - margin - BUBBLE_COLUMNS
    needs = plan.peak_bytes_by_device()
    title = heading("memory over the step")
    if all(need < limit * _ENOUGH_TO_SEE for need, limit in zip(needs, limits, strict=True)):
        title.append(f", up to the largest need ({format_bytes(max(needs))})", "not bold")
        full = [max(1, *needs)] * len(limits)
    else:
        title.append(", up to the memory limit of each device", "not bold")
        full = [max(1, limit) for limit in limits]
    rows: list[RenderableType] = [title]
    for device, held in enumerate(memory_over_time(step, columns=columns, end_us=step.pipeline_us)):
        row = Text(f"{called} {device}".ljust(margin))
        row.append("".join(_level(size, full[device]) for size in held), "color(172)")
        share = share_of_limit(needs[device], limits[device]).rjust(BUBBLE_COLUMNS)
        rows.append(row.append(share, "bold red" if needs[device] > limits[device] else ""))
    return rows


def _level(size: int, full: int) -> str:
    # Rounding down: a bar has full height only if the memory reaches the limit.
    return _LEVELS[min(len(_LEVELS) - 1, size * (len(_LEVELS) - 1) // full)]
