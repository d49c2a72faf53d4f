"""A table of values: what every medium draws in its own way, with its own units, marks and choice of columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from planner.core.values.units import format_bytes, format_us
from planner.show.views.numbers import NOTHING, TimeScale, percent, rate

Unit = Literal["text", "count", "us", "bytes", "percent", "share", "rate"]
Value = str | float | None
"""A string says in words why there is no number; None is nothing to show."""
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
    """One column."""

    name: str
    """Renderers pick the column by it."""
    title: str
    """A line feed stands where it may be broken."""
    values: tuple[Value, ...] = ()
    unit: Unit = "text"
    """Text stands to the left, all else to the right, even where a value is given in words."""
    per: str = ""
    """What times are of: columns of one such share a unit where digits are compared; empty: each has its own."""
    goes: int = 0
    """The larger, the sooner the column is left out where there is no room; 0 stays in any case."""
    marked: frozenset[int] = frozenset()
    """Rows in which the value is stressed: what is slowest, chosen, or over its cap."""

    @property
    def heading(self) -> str:
        return self.title.replace("\n", " ")

    def texts(self, scale: TimeScale | None = None) -> tuple[str, ...]:
        """Every value with its unit; without, where `scale` is the unit of the whole column."""
        text = _TEXTS[self.unit] if scale is None else scale.text
        return tuple(NOTHING if v is None else v if isinstance(v, str) else text(v) for v in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length."""

    columns: tuple[Column, ...]
    group: int = 0
    """After how many rows there is a gap; 0 for none."""

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.columns if column.name == name)

    def pick(self, *names: str) -> "Table":
        """Some of the columns, in that order."""
        return replace(self, columns=tuple(map(self.column, names)))

    def without(self, *names: str) -> "Table":
        """The columns but for these."""
        return self.pick(*(column.name for column in self.columns if column.name not in names))

    def titled(self, **titles: str) -> "Table":
        """The table with other titles for some columns."""
        return replace(self, columns=tuple(replace(c, title=titles.get(c.name, c.title)) for c in self.columns))

    def reworded(self, name: str, texts: Iterable[str], unit: Unit | None = None) -> "Table":
        """The table with other texts in one column, and its values as words if `unit` says so."""
        values = tuple(texts)
        changed = (replace(c, values=values, unit=unit or c.unit) if c.name == name else c for c in self.columns)
        return replace(self, columns=tuple(changed))

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Every row as texts, each value with a unit of its own."""
        return tuple(zip(*(column.texts() for column in self.columns), strict=True))

    def scales(self) -> Mapping[str, TimeScale]:
        """The unit of each `per`, in which its largest time has three or four digits."""
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
    goes: int = 0,
    marked: frozenset[int] = frozenset(),
) -> tuple[Column, Callable[[Row], Value]]:
    """A column for `table`, with the fields of `Column`, and how its value is read from a row."""
    return Column(name=name, title=title, unit=unit, per=per, goes=goes, marked=marked), value


def table(rows: Sequence[Row], *columns: tuple[Column, Callable[[Row], Value]], group: int = 0) -> Table:
    """The table whose columns hold what is read from each of `rows`."""
    filled = (replace(column, values=tuple(map(value, rows))) for column, value in columns)
    return Table(columns=tuple(filled), group=group)
