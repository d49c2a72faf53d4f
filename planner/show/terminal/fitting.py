"""Tables that leave out their less important columns where there is no room, rather than break numbers."""

from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.table import Table

from planner.show.terminal.rendering import Column, plain, table
from planner.show.terminal.style import Style

__all__ = ["Rows", "fitting_table"]

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Names of the columns, and the rows."""

_GAP = 2


def fitting_table(
    found: Rows, style: Style, *, words: Collection[int], goes: Sequence[int], group: int | None = None
) -> Table:
    """The rows as a table.

    Args:
        found: Names and rows; a name of two words is broken between them.
        style: How to draw.
        words: Columns that hold words, not numbers.
        goes: Columns that may be left out, the first to go first.
        group: After how many rows there is a gap; None for none.
    """
    names = [name.replace(" ", "\n") if name.count(" ") == 1 else name for name in found[0]]
    rows = [[plain(item, style) for item in row] for row in found[1]]
    kept = list(range(len(names)))
    for column in goes:
        if style.has_room_for(_width(kept, names, rows)):
            break
        kept.remove(column)
    columns = [Column(header=names[n], number=n not in words) for n in kept]
    lines: list[list[str] | None] = []
    for number, row in enumerate(rows):
        lines += [None] if group and number and number % group == 0 else []
        lines.append([row[n] for n in kept])
    return table(columns, lines, style)


def _width(kept: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    cells = ([*names[n].split("\n"), *(row[n] for row in rows)] for n in kept)
    return sum(max(map(cell_len, column)) for column in cells) + _GAP * (len(kept) - 1)
