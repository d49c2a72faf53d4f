"""Measured links between devices, as a table."""

from planner.core.values.links import Links
from planner.core.values.printable import printable
from planner.core.values.units import format_bytes, format_rate, format_us, pluralize
from planner.show.terminal.rendering import BLANK, heading, render, wrap_items
from planner.show.terminal.style import Style
from planner.show.terminal.tables import TextColumn, rich_table
from planner.show.views.numbers import NOTHING

_NUMBERS = ("latency", "bandwidth", "largest message", "")


def links_text(links: Links, style: Style) -> str:
    """Return a table of the links between neighbors: latency, bandwidth, and time of the largest measured message."""
    machine = [f"{links.device.kind} {links.device.name}".strip(), links.backend, f"torch {links.environment.torch}"]
    columns = [TextColumn(header="link", number=False), *(TextColumn(header=name) for name in _NUMBERS)]
    rows = []
    for n, boundary in enumerate(links.boundaries):
        link, sizes = boundary.link, boundary.sample_bytes
        rows.append(
            [
                f"{n} to {n + 1}",
                format_us(link.latency_us),
                format_rate(link.bytes_per_s) if link.bytes_per_s else "unlimited",
                f"{format_bytes(sizes[-1])} in {format_us(boundary.sample_us[-1])}" if sizes else NOTHING,
                "does not overlap with compute" if link.blocking else "",
            ]
        )
    return render(
        style,
        heading(f"{pluralize(len(links.boundaries), 'link')} between neighbors"),
        wrap_items((printable(item) for item in machine), style, gap=" · "),
        BLANK,
        rich_table(columns, rows),
    )
