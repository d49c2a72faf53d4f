"""Table of values with units, which the terminal, HTML and Markdown print."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from planner.core.values.units import format_bytes, format_us
from planner.show.views.numbers import NOTHING, TimeUnit, percent, rate_text

Unit = Literal["text", "count", "us", "bytes", "percent", "share", "rate"]
Value = str | float | None
"""Value of a cell: a number; a text, for example why a number is missing; or None for an empty cell."""
Row = TypeVar("Row")

_TEXTS: Final[Mapping[Unit, Callable[[float], str]]] = {
    "text": str,
    "count": str,
    "us": format_us,
    "bytes": format_bytes,
    "percent": percent,
    "share": lambda share: percent(share, decimals=0),
    "rate": rate_text,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of a table: values with a title and a unit."""

    name: str
    """Name by which renderers select the column."""
    title: str
    """Title; a line feed marks where it may be broken."""
    values: tuple[Value, ...] = ()
    unit: Unit = "text"
    """Unit of the values. Only columns of unit `text` are left-aligned."""
    per: str = ""
    """Denominator of the times, such as `micro-batch`. Columns with equal denominators share a unit of time. Without a
    denominator, each value has its own unit."""
    drop: int = 0
    """Priority for removing the column if space is short: the largest number is removed first, 0 never."""
    marked: frozenset[int] = frozenset()
    """Indices of rows whose value is emphasized, for example the slowest stage."""

    @property
    def heading(self) -> str:
        return self.title.replace("\n", " ")

    def texts(self, time_unit: TimeUnit | None = None) -> tuple[str, ...]:
        """Return the values as texts: with their own units, or as numbers in `time_unit`."""
        text = _TEXTS[self.unit] if time_unit is None else time_unit.text
        return tuple(NOTHING if v is None else v if isinstance(v, str) else text(v) for v in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table of values."""

    columns: tuple[Column, ...]
    group: int = 0
    """Number of rows after which renderers leave a gap; 0 for no gaps."""

    def column(self, name: str) -> Column:
        """Return the column with this name."""
        return next(column for column in self.columns if column.name == name)

    def pick(self, *names: str) -> "Table":
        """Return the table with only these columns, in this order."""
        return replace(self, columns=tuple(map(self.column, names)))

    def without(self, *names: str) -> "Table":
        """Return the table without these columns."""
        return self.pick(*(column.name for column in self.columns if column.name not in names))

    def with_titles(self, **titles: str) -> "Table":
        """Return the table with new titles of some columns, by column name."""
        return replace(self, columns=tuple(replace(c, title=titles.get(c.name, c.title)) for c in self.columns))

    def with_texts(self, name: str, texts: Iterable[str], unit: Unit | None = None) -> "Table":
        """Return the table with other texts in one column.

        Args:
            name: Name of the column.
            texts: Text of each row.
            unit: Unit of the texts; None keeps the column's unit.
        """
        values = tuple(texts)
        changed = (replace(c, values=values, unit=unit or c.unit) if c.name == name else c for c in self.columns)
        return replace(self, columns=tuple(changed))

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Return the values of every row as texts, with their units."""
        return tuple(zip(*(column.texts() for column in self.columns), strict=True))

    def time_units(self) -> Mapping[str, TimeUnit]:
        """Return a common unit of time for all columns with times of one kind, such as times per micro-batch.

        The keys are the values of `Column.per` in this table, such as `micro-batch`.
        """
        times: dict[str, list[float]] = {}
        for column in self.columns:
            if column.per:
                times.setdefault(column.per, []).extend(v for v in column.values if isinstance(v, (int, float)))
        return {per: TimeUnit.fitting(numbers) for per, numbers in times.items()}


def column(
    name: str,
    title: str,
    value: Callable[[Row], Value],
    unit: Unit = "text",
    *,
    per: str = "",
    drop: int = 0,
    marked: frozenset[int] = frozenset(),
) -> tuple[Column, Callable[[Row], Value]]:
    """Return a definition of a column for the function `table`: a `Column` without values, and the function `value`.

    The function `table` fills the column with the result of `value` for each row.

    Args:
        name: Name of the column.
        title: Title of the column.
        value: Function that reads the column's value from a row.
        unit: Unit of the values.
        per: Denominator of the times, such as `micro-batch`.
        drop: Priority for removing the column if space is short; 0 is never removed.
        marked: Indices of rows whose value is emphasized.
    """
    return Column(name=name, title=title, unit=unit, per=per, drop=drop, marked=marked), value


def table(rows: Sequence[Row], *columns: tuple[Column, Callable[[Row], Value]], group: int = 0) -> Table:
    """Return a table with a row for each of `rows`. Renderers leave a gap after every `group` rows; 0 for no gaps.

    Each of `columns` is a result of the function `column`.
    """
    filled = (replace(column, values=tuple(map(value, rows))) for column, value in columns)
    return Table(columns=tuple(filled), group=group)
