"""Tables for the terminal, without columns that do not fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

from planner.core.values.printable import printable
from planner.show.terminal.style import Style
from planner.show.views.table import Column, Table

GAP = 2
"""Number of spaces between columns."""


def terminal_table(view: Table, marks: Mapping[str, tuple[str, str]] | None = None) -> RichTable:
    """Return `view` as a table for the terminal, with suffixes and colors from `marks` on emphasized values.

    `marks` has the suffix and the color of emphasized values (`Column.marked`), by column name.
    """
    columns = [TextColumn(header=_header(column, view), number=column.unit != "text") for column in view.columns]
    rows = list(zip(*(_cells(column, view, marks) for column in view.columns), strict=True))
    lines: list[tuple[Text, ...] | None] = []
    for number, row in enumerate(rows):
        lines += [None] if view.group and number and number % view.group == 0 else []
        lines.append(row)
    return rich_table(columns, lines)


def fit_columns(view: Table, style: Style) -> Table:
    """Return the table without the least important columns, so that it fits into the terminal."""
    shown = view
    while not style.has_room_for(table_width(shown)) and any(column.drop for column in shown.columns):
        shown = shown.without(max(shown.columns, key=lambda column: column.drop).name)
    return shown


def table_width(view: Table) -> int:
    """Return the width of the table in the terminal, in characters."""
    widths = (
        max(map(cell_len, (*_header(column, view).split("\n"), *(cell.plain for cell in _cells(column, view)))))
        for column in view.columns
    )
    return sum(widths) + GAP * (len(view.columns) - 1)


def _header(column: Column, view: Table) -> str:
    return f"{column.title}\n{view.time_units()[column.per].unit}" if column.per else column.title


def _cells(column: Column, view: Table, marks: Mapping[str, tuple[str, str]] | None = None) -> list[Text]:
    mark, look = (marks or {}).get(column.name, ("", ""))
    texts = [printable(text) for text in column.texts(view.time_units().get(column.per))]
    justify: Literal["left"] | None = None
    if column.marked and column.unit != "text":
        # Digits are aligned, and marks follow them. rich would remove spaces at the end of a right-aligned text.
        justify, width = "left", max(map(cell_len, texts))
        texts = [text.rjust(width) for text in texts]
    return [
        Text(f"{text}{mark}", style=look, justify=justify) if row in column.marked else Text(text, justify=justify)
        for row, text in enumerate(texts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumn:
    """Column of a table in the terminal."""

    header: str
    footer: str = ""
    number: bool = True
    """True for numbers, which are right-aligned and never broken."""


def facts_table(rows: Sequence[tuple[str, str | Text]], style: Style) -> RichTable:
    """Return a table without lines. Each row has a name on the left and a text on the right."""
    drawn = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    names = max(cell_len(name) for name, _ in rows)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold", max_width=style.columns - names - GAP)
    for name, said in rows:
        drawn.add_row(Text(name), Text(said) if isinstance(said, str) else said)
    return drawn


def rich_table(columns: Sequence[TextColumn], rows: Iterable[Sequence[str | Text] | None]) -> RichTable:
    """Return a table with a line below its header, and one above its footer. A row None is a gap between rows."""
    drawn = RichTable(
        box=SIMPLE,
        show_edge=False,
        show_footer=any(column.footer for column in columns),
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        footer_style="bold",
    )
    for column in columns:
        drawn.add_column(
            Text(column.header),
            Text(column.footer),
            justify="right" if column.number else "left",
            vertical="top",
            no_wrap=column.number,
            overflow="fold",
        )
    for row in rows:
        if row is None:
            drawn.add_section()
        else:
            drawn.add_row(*(Text(item) if isinstance(item, str) else item for item in row))
    return drawn
