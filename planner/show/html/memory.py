"""Memory per device against its cap, stacked by kind."""

from planner.core.values.plan import Plan
from planner.core.values.units import format_bytes
from planner.show.html.parts import Section, bar, legend, scroll
from planner.show.markup import element, number
from planner.show.views.memory import DeviceMemory, device_memory, fullest, kind_words, kinds_there
from planner.show.views.numbers import place_word

_ROOM_FOR_WORDS = 0.13
_MANY = 24


def memory_section(plan: Plan) -> Section:
    """A bar per device."""
    devices = device_memory(plan.by_device())
    most, cap = max(d.total_bytes for d in devices), max(d.cap_bytes for d in devices)
    full = max(most, cap) if most * 4 >= cap else most
    rows = [_row(device, full) for device in devices]
    nearest = fullest(devices)
    lead = (
        f"Predicted peak of every {place_word(plan.chunks)} by kind; the line is its cap. Fullest: {nearest.label}, "
        f"{nearest.need_of_cap}."
    )
    if full < cap:
        lead += " The caps lie far to the right of the picture."
    bars = element("div", *rows, class_="bars many" if len(rows) > _MANY else "bars")
    body = scroll(bars, "memory of every device") if len(rows) > _MANY else bars
    body += legend((f"m-{kind}", kind_words(kind)) for kind in kinds_there(devices))
    return Section(anchor="memory", title="Memory", lead=lead, body=body)


def _row(device: DeviceMemory, full: int) -> str:
    parts, edge, cap = [], 0, device.cap_bytes
    for kind, size in device.memory.items():
        if size:
            share, words = size / full, kind_words(kind)
            named = element("span", words) if share >= _ROOM_FOR_WORDS else ""
            place = f"left:{number(edge / full * 100)}%;width:{number(share * 100)}%"
            parts.append(element("i", named, class_=f"m-{kind}", style=place, title=f"{words} {format_bytes(size)}"))
        edge += size
    if cap <= full:
        parts.append(bar("cap", cap / full, 0.0, f"cap {format_bytes(cap)}"))
    words = f"{device.need_of_cap}, {device.share}{' ! over' if device.is_over else ''}"
    return element(
        "div",
        element("b", device.label),
        element("div", *parts, class_="track"),
        element("span", words, class_="over" if device.is_over else None),
        class_="bar",
    )
