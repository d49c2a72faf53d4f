"""A table of values: what every medium draws in its own way, with its own units, marks and choice of columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from planner.core.values.units import format_bytes, format_us
from planner.show.views.numbers import NOTHING, TimeScale, percent, rate

__all__ = ["Column", "Table", "Unit", "Value"]

Unit = Literal["text", "count", "us", "bytes", "percent", "share", "rate"]
Value = str | float | None
"""A string says in words why there is no number; None is nothing to show."""

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
    """By which renderers pick it."""
    title: str
    """A line feed stands where it may be broken."""
    values: tuple[Value, ...]
    unit: Unit = "text"
    """Text stands to the left, all else to the right, even where a value is given in words."""
    per: str = ""
    """What times are of: columns of one such share a unit where digits are compared; empty: each has its own."""
    marked: frozenset[int] = frozenset()
    """Rows in which the value is stressed: what is slowest, chosen, or over its cap."""
    goes: int = 0
    """The larger, the sooner the column is left out where there is no room; 0 stays in any case."""

    @property
    def heading(self) -> str:
        """The title on one line."""
        return self.title.replace("\n", " ")

    def text(self, value: Value, scale: TimeScale | None = None) -> str:
        """A value with its unit; without, where `scale` is the unit of the whole column."""
        if value is None:
            return NOTHING
        if isinstance(value, str):
            return value
        return scale.text(value) if scale is not None else _TEXTS[self.unit](value)

    def texts(self, scale: TimeScale | None = None) -> tuple[str, ...]:
        """Every value."""
        return tuple(self.text(value, scale) for value in self.values)


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
        return replace(self, columns=tuple(column for column in self.columns if column.name not in names))

    def titled(self, **titles: str) -> "Table":
        """With other titles for some columns."""
        columns = (replace(column, title=titles.get(column.name, column.title)) for column in self.columns)
        return replace(self, columns=tuple(columns))

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Every row as texts, each value with a unit of its own."""
        return tuple(zip(*(column.texts() for column in self.columns), strict=True))

    def scales(self) -> Mapping[str, TimeScale]:
        """For each `per` the unit in which its largest time has three or four digits."""
        times: dict[str, list[float]] = {}
        for column in self.columns:
            if column.per:
                numbers = [value for value in column.values if value is not None and not isinstance(value, str)]
                times.setdefault(column.per, []).extend(numbers)
        return {per: TimeScale.fitting(numbers) for per, numbers in times.items()}
