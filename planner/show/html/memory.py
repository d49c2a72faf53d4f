"""Memory per device against its cap, stacked by kind."""

from collections.abc import Sequence

from planner.core.values.plan import Plan, Stage, StageMemory
from planner.core.values.units import format_bytes
from planner.show.html.parts import KINDS, Section, bar, legend, scroll, words
from planner.show.markup import element, number
from planner.show.terminal.memory import share_of_cap

__all__ = ["memory_section"]

_ROOM_FOR_WORDS = 0.13
_MANY = 24


def memory_section(plan: Plan) -> Section:
    """A bar per device."""
    called = "stage" if plan.chunks == 1 else "device"
    devices = [_sum(plan.stages[d :: plan.num_devices]) for d in range(plan.num_devices)]
    caps = [plan.stages[d].memory_bytes for d in range(plan.num_devices)]
    most, cap = max(m.total for m in devices), max(caps)
    full = max(most, cap) if most * 4 >= cap else most
    rows = [_row(f"{called} {d}", m, c, full) for d, (m, c) in enumerate(zip(devices, caps, strict=True))]
    fullest = max(range(len(devices)), key=lambda d: devices[d].total / max(1, caps[d]))
    lead = (
        f"Predicted peak of every {called} by kind; the line is its cap. Fullest: {called} {fullest}, "
        f"{format_bytes(devices[fullest].total)} of {format_bytes(caps[fullest])}."
    )
    if full < cap:
        lead += " The caps lie far to the right of the picture."
    looks = [(f"m-{kind}", words(kind)) for kind in KINDS if any(getattr(m, kind) for m in devices)]
    bars = element("div", *rows, class_="bars many" if len(rows) > _MANY else "bars")
    body = (scroll(bars, "memory of every device") if len(rows) > _MANY else bars) + legend(looks)
    return Section(anchor="memory", title="Memory", lead=lead, body=body)


def _sum(chunks: Sequence[Stage]) -> StageMemory:
    return StageMemory(**{name: sum(getattr(chunk.memory, name) for chunk in chunks) for name in (*KINDS, "total")})


def _row(label: str, memory: StageMemory, cap: int, full: int) -> str:
    parts, edge = [], 0
    for kind, size in memory.items():
        if size:
            share = size / full
            named = element("span", words(kind)) if share >= _ROOM_FOR_WORDS else ""
            place = f"left:{number(edge / full * 100)}%;width:{number(share * 100)}%"
            parts.append(
                element("i", named, class_=f"m-{kind}", style=place, title=f"{words(kind)} {format_bytes(size)}")
            )
        edge += size
    if cap <= full:
        parts.append(bar("cap", cap / full, 0.0, f"cap {format_bytes(cap)}"))
    over = memory.total > cap
    told = f"{format_bytes(memory.total)} of {format_bytes(cap)}, {share_of_cap(memory.total, cap)}"
    told += " ! over" if over else ""
    return element(
        "div",
        element("b", label),
        element("div", *parts, class_="track"),
        element("span", told, class_="over" if over else None),
        class_="bar",
    )
