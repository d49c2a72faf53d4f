"""Tables laid out by rich. Output without tables does not need to import this module."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from planner.show.terminal.style import Style

_FACTS_GAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumn:
    """Column of a table in the terminal."""

    header: str
    footer: str = ""
    number: bool = True
    """True for numbers, which are right-aligned and never broken. Other columns are left-aligned, and long cells are
    broken."""


def facts_table(rows: Sequence[tuple[str, str | Text]], style: Style) -> Table:
    """Return a table without lines. Each row has a name on the left and a text on the right."""
    drawn = Table.grid(padding=(0, _FACTS_GAP, 0, 0), pad_edge=False)
    names = max(cell_len(name) for name, _ in rows)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold", max_width=style.columns - names - _FACTS_GAP)
    for name, said in rows:
        drawn.add_row(Text(name), Text(said) if isinstance(said, str) else said)
    return drawn


def rich_table(columns: Sequence[TextColumn], rows: Iterable[Sequence[str | Text] | None]) -> Table:
    """Return a table with a line below its header, and one above its footer. A row None is a gap between rows."""
    drawn = Table(
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
