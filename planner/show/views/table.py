"""Table of values, which every medium renders with its own units, marks and choice of columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from planner.core.values.units import format_bytes, format_us
from planner.show.views.numbers import NOTHING, TimeScale, percent, rate

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
    "rate": rate,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of a table."""

    name: str
    """Name by which renderers select the column."""
    title: str
    """Title; it may be broken at its line feed."""
    values: tuple[Value, ...] = ()
    unit: Unit = "text"
    """Unit; text is left-aligned, everything else right-aligned, even values in words."""
    per: str = ""
    """Reference of times, such as micro-batch. Columns with the same one share a unit; if empty, each value has its own
    unit."""
    drop: int = 0
    """Priority for removing the column if space is short: the largest value first; 0 is never removed."""
    marked: frozenset[int] = frozenset()
    """Rows whose value is emphasized: the slowest, the chosen, or one above its limit."""

    @property
    def heading(self) -> str:
        return self.title.replace("\n", " ")

    def texts(self, scale: TimeScale | None = None) -> tuple[str, ...]:
        """Return every value with its unit; without units if `scale` is the unit of the whole column."""
        text = _TEXTS[self.unit] if scale is None else scale.text
        return tuple(NOTHING if v is None else v if isinstance(v, str) else text(v) for v in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length."""

    columns: tuple[Column, ...]
    group: int = 0
    """Number of rows between gaps; 0 for no gaps."""

    def column(self, name: str) -> Column:
        """Return the column with this name."""
        return next(column for column in self.columns if column.name == name)

    def pick(self, *names: str) -> "Table":
        """Return the table with only these columns, in this order."""
        return replace(self, columns=tuple(map(self.column, names)))

    def without(self, *names: str) -> "Table":
        """Return the table without these columns."""
        return self.pick(*(column.name for column in self.columns if column.name not in names))

    def titled(self, **titles: str) -> "Table":
        """Return the table with other titles for some columns."""
        return replace(self, columns=tuple(replace(c, title=titles.get(c.name, c.title)) for c in self.columns))

    def reworded(self, name: str, texts: Iterable[str], unit: Unit | None = None) -> "Table":
        """Return the table with other texts in one column, and another unit if given."""
        values = tuple(texts)
        changed = (replace(c, values=values, unit=unit or c.unit) if c.name == name else c for c in self.columns)
        return replace(self, columns=tuple(changed))

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Return every row as texts, each value with its own unit."""
        return tuple(zip(*(column.texts() for column in self.columns), strict=True))

    def scales(self) -> Mapping[str, TimeScale]:
        """Return the unit of each `per`, in which its largest time has three or four digits."""
        times: dict[str, list[float]] = {}
        for column in self.columns:
            if column.per:
                times.setdefault(column.per, []).extend(v for v in column.values if isinstance(v, (int, float)))
        return {per: TimeScale.fitting(numbers) for per, numbers in times.items()}


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
    """Return a column for `table`, with the fields of `Column`, and the function that reads its value from a row.

    Args:
        name: Name of the column.
        title: Its title.
        value: Reads the value from a row.
        unit: Unit of the values.
        per: Reference of times.
        drop: Priority for removing the column if space is short; 0 is never removed.
        marked: Rows whose value is emphasized.

    Returns:
        The column and the function.
    """
    return Column(name=name, title=title, unit=unit, per=per, drop=drop, marked=marked), value


def table(rows: Sequence[Row], *columns: tuple[Column, Callable[[Row], Value]], group: int = 0) -> Table:
    """Return the table whose columns have the values read from each of `rows`."""
    filled = (replace(column, values=tuple(map(value, rows))) for column, value in columns)
    return Table(columns=tuple(filled), group=group)
