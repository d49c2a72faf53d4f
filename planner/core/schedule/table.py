"""Compute-only schedule files of torch, torchtitan and NeMo Automodel: action orders as a CSV table.

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

A row is a device, a cell an action written as stage, kind and micro-batch: `2F0`, `2B0`, `2I0`, `2W0`. An empty cell is
an idle slot, used only for drawing, because devices wait only for their dependencies. `(0F1;1B0)OVERLAP_F_B` is a
forward and a backward that torch may overlap; it is read as two consecutive actions.
"""

import csv
import re
from collections.abc import Iterator, Sequence

from planner.core.errors import UsageError
from planner.core.schedule.base import Action

_HINT = "write a row for each device, with cells as `2F0`, `2B0`, `2I0`, `2W0`; an empty cell is an idle slot"
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_TRANSFER = re.compile(r"[0-9]+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")


def orders_as_csv(actions: Sequence[Sequence[Action]]) -> str:
    """Return the CSV table of action orders: a line for each device, without idle slots."""
    return "".join(",".join(map(str, row)) + "\n" for row in actions)


def orders_from_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the action orders in a CSV table, without idle slots; `check_orders` checks if they can run.

    Raises:
        UsageError: The text is empty or not CSV, a row has no action, or a cell is not an action. Messages count rows
            and columns from 1.
    """
    lines = text.removeprefix("\ufeff").rstrip().splitlines()
    if not lines:
        raise UsageError("the schedule file is empty", hint=_HINT)
    return tuple(_row(number, line) for number, line in enumerate(lines, start=1))


def _row(number: int, line: str) -> tuple[Action, ...]:
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error as error:
        raise UsageError(f"row {number}: {error}", hint=_HINT) from None
    actions = tuple(action for column, cell in enumerate(cells, start=1) for action in _cell(number, column, cell))
    if not actions:
        raise UsageError(f"row {number}: the device has no action", hint=_HINT)
    return actions


def _cell(row: int, column: int, cell: str) -> Iterator[Action]:
    text = cell.strip()
    overlap = _OVERLAP.fullmatch(text)
    parts = overlap[1].split(";") if overlap else [text] if text else []
    for part in parts:
        action = Action.from_text(part.strip())
        if action is None:
            raise UsageError(f"row {row}, column {column}: {_problem(part.strip())}", hint=_HINT)
        yield action


def _problem(text: str) -> str:
    short = text if len(text) <= 40 else f"{text[:37]}..."
    if _TRANSFER.fullmatch(text):
        return f"`{short}` is a transfer: only compute-only tables can be read"
    if Action.from_text(text.upper()):
        return f"`{short}` must be in upper case"
    return f"`{short}` is not an action"
