"""Views as tables of the terminal: times of a kind in one unit, and no more columns than there is room for."""

from collections.abc import Mapping

from rich.cells import cell_len
from rich.table import Table as Drawn
from rich.text import Text

from planner.show.terminal import grids
from planner.show.terminal.rendering import plain
from planner.show.terminal.style import Style
from planner.show.views.table import Column, Table

GAP = 2
"""Columns between those of a table."""


def drawn(view: Table, style: Style, marks: Mapping[str, tuple[str, str]] | None = None) -> Drawn:
    """The table; `marks` says by column what follows the values that are marked there, and their look."""
    columns = [grids.Column(header=_header(column, view), number=column.unit != "text") for column in view.columns]
    rows = list(zip(*(_cells(column, view, style, marks or {}) for column in view.columns), strict=True))
    lines: list[tuple[Text, ...] | None] = []
    for number, row in enumerate(rows):
        lines += [None] if view.group and number and number % view.group == 0 else []
        lines.append(row)
    return grids.table(columns, lines, style)


def fitted(view: Table, style: Style) -> Table:
    """The columns for which there is room: rather than break numbers, the less important ones go."""
    kept = view
    while not style.has_room_for(width_of(kept, style)) and any(column.goes for column in kept.columns):
        kept = kept.without(max(kept.columns, key=lambda column: column.goes).name)
    return kept


def width_of(view: Table, style: Style) -> int:
    """How many columns of the terminal the table takes."""
    widths = (
        max(map(cell_len, (*_header(column, view).split("\n"), *(cell.plain for cell in _cells(column, view, style)))))
        for column in view.columns
    )
    return sum(widths) + GAP * (len(view.columns) - 1)


def _header(column: Column, view: Table) -> str:
    return f"{column.title}\n{view.scales()[column.per].unit}" if column.per else column.title


def _cells(column: Column, view: Table, style: Style, marks: Mapping[str, tuple[str, str]] | None = None) -> list[Text]:
    mark, look = (marks or {}).get(column.name, ("", ""))
    texts = column.texts(view.scales().get(column.per))
    return [
        Text(f"{plain(text, style)}{mark}", style=look) if row in column.marked else Text(plain(text, style))
        for row, text in enumerate(texts)
    ]
