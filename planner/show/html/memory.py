"""Section about the memory of each device by component, compared with its limit, and over time."""

from collections.abc import Sequence
from itertools import pairwise

from planner.core.values.plan import Plan
from planner.core.values.units import format_bytes, format_us
from planner.show.html.parts import Section, bar_part, legend, remark, scroll_box
from planner.show.markup import element, number
from planner.show.step import StepTimeline, memory_over_time
from planner.show.views.memory import DeviceMemory, component_title, device_memory, fullest_device, present_components
from planner.show.views.numbers import row_noun

_ROOM_FOR_WORDS = 0.13
_MANY = 24
_COLUMNS = 480
"""Number of equal intervals of a step for which the picture shows the highest memory."""


def memory_section(plan: Plan, step: StepTimeline | None) -> Section:
    """Return a section with a bar for the peak memory of each device, and with memory over time if `step` is given."""
    devices = device_memory(plan.by_device())
    most, limit = max(d.total_bytes for d in devices), max(d.limit_bytes for d in devices)
    full = max(1, most, limit if most * 4 >= limit else 0)
    rows = [_row(device, full) for device in devices]
    nearest = fullest_device(devices)
    lead = (
        f"Predicted peak of every {row_noun(plan.chunks)} by component; the line is its memory limit. Fullest: "
        f"{nearest.label}, {nearest.need_of_limit}."
    )
    if full < limit:
        lead += " The memory limits are beyond the right edge."
    bars = element("div", *rows, class_="bars many" if len(rows) > _MANY else "bars")
    body = scroll_box(bars, "memory of every device") if len(rows) > _MANY else bars
    body += legend((f"m-{kind}", component_title(kind)) for kind in present_components(devices))
    if step is not None and step.pipeline_us > 0:
        body += _over_time(devices, step, full)
    return Section(anchor="memory", title="Memory", lead=lead, body=body)


def _over_time(devices: Sequence[DeviceMemory], step: StepTimeline, full: int) -> str:
    held = memory_over_time(step, columns=_COLUMNS, end_us=step.pipeline_us)
    rows = [_held_row(device, levels, full) for device, levels in zip(devices, held, strict=True)]
    bars = element("div", *rows, class_="bars many" if len(rows) > _MANY else "bars held")
    words = f"Over the step, {format_us(step.pipeline_us)} from left to right; the line is the memory limit."
    return remark(words) + (scroll_box(bars, "memory over time") if len(rows) > _MANY else bars)


def _held_row(device: DeviceMemory, levels: Sequence[int], full: int) -> str:
    # The path steps up or down where the memory of an interval differs from the previous one.
    edges = [(0, levels[0]), *((n, now) for n, (before, now) in enumerate(pairwise(levels), 1) if now != before)]
    steps = "".join(f"H{n}V{number(100 - size / full * 100)}" for n, size in edges)
    area = element("path", d=f"M0 100{steps}H{len(levels)}V100Z", class_="m-in_flight")
    parts = [area]
    if device.limit_bytes <= full:
        y = 100 - device.limit_bytes / full * 100
        drawn = f"M0 {number(y)}H{len(levels)}"
        style_class = "over" if device.is_over else "cap"
        parts.append(element("path", d=drawn, class_=style_class, vector_effect="non-scaling-stroke"))
    words = f"{device.label}: at most {device.need_of_limit}"
    picture = element(
        "svg", *parts, viewBox=f"0 0 {len(levels)} 100", preserveAspectRatio="none", role="img", aria_label=words
    )
    return element(
        "div",
        element("b", device.label),
        element("div", picture, class_="track"),
        element("span", f"at most {format_bytes(device.total_bytes)}"),
        class_="bar",
    )


def _row(device: DeviceMemory, full: int) -> str:
    parts, edge, limit = [], 0, device.limit_bytes
    for kind, size in device.memory.items():
        if size:
            share, words = size / full, component_title(kind)
            named = element("span", words) if share >= _ROOM_FOR_WORDS else ""
            place = f"left:{number(edge / full * 100)}%;width:{number(share * 100)}%"
            parts.append(element("i", named, class_=f"m-{kind}", style=place, title=f"{words} {format_bytes(size)}"))
        edge += size
    if limit <= full:
        parts.append(bar_part("cap", limit / full, 0.0, f"limit {format_bytes(limit)}"))
    words = f"{device.need_of_limit}, {device.share}{' ! over' if device.is_over else ''}"
    return element(
        "div",
        element("b", device.label),
        element("div", *parts, class_="track"),
        element("span", words, class_="over" if device.is_over else None),
        class_="bar",
    )
