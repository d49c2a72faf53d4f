"""Tables of numbers in the data of the interactive report. Equal columns, and equal rows, are stored once."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_DIGITS: Final = 7
"""Number of significant digits of numbers that are not whole."""

ZERO: Final = -1
"""Index that stands for a column of zeros, which is not stored."""


class NumberTable:
    """Table of numbers with a fixed number of rows, to which columns are added."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._places: dict[bytes, int] = {}
        self._columns: list[FloatArray] = []

    def add(self, values: FloatArray | float) -> int:
        """Add a column and return its index, which is `ZERO` for a column of zeros."""
        column = _rounded(np.broadcast_to(np.asarray(values, float), self.num_rows))
        if not column.any():
            return ZERO
        place = self._places.setdefault(column.tobytes(), len(self._columns))
        if place == len(self._columns):
            self._columns.append(column)
        return place

    def json_data(self) -> dict[str, Any]:
        """Return the table as JSON data without repeated rows.

        `columns` has one list per column, with one value per distinct row. `rows` has, for each row of the table, its
        index in these lists; `rows` is None if all rows are distinct.
        """
        if not self._columns:
            return {"rows": None, "columns": []}
        numbers = np.stack(self._columns, axis=1)
        distinct, places = np.unique(numbers, axis=0, return_inverse=True)
        if len(distinct) == len(numbers):
            return {"rows": None, "columns": [_plain(column) for column in self._columns]}
        return {"rows": places.ravel().tolist(), "columns": [_plain(column) for column in distinct.T]}


def _rounded(values: FloatArray) -> FloatArray:
    magnitudes = np.floor(np.log10(np.maximum(np.abs(values), 1e-3)))
    scales = 10.0 ** np.maximum(_DIGITS - 1 - magnitudes, 0.0)
    rounded: FloatArray = np.rint(values * scales) / scales + 0.0
    return rounded


def _plain(column: FloatArray) -> list[float]:
    return [int(value) if value.is_integer() else value for value in column.tolist()]
