"""What every device holds over the time of a step: its highest level within each of so many columns."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from planner.show.step import Level, Step


def held_bytes(step: Step, *, columns: int, end_us: float) -> list[list[int]]:
    """Bytes per device and column; a column has the highest of its levels, so that no peak is lost.

    Args:
        step: The step.
        columns: Into how many the time from 0 to `end_us` is divided.
        end_us: In microseconds, above 0; levels that begin later are left out.
    """
    return [_highest(levels, columns, end_us) for levels in step.memory]


def _highest(levels: Sequence[Level], columns: int, end_us: float) -> list[int]:
    highest = [0] * columns
    ends = [*(after.start_us for _, after in pairwise(levels)), end_us]
    for level, until_us in zip(levels, ends, strict=True):
        # What lasts no time is no moment of a picture, but its column shows it.
        first = int(level.start_us / end_us * columns)
        last = max(first + 1, ceil(min(until_us, end_us) / end_us * columns - 1e-9))
        for column in range(first, min(last, columns)):
            highest[column] = max(highest[column], level.bytes)
    return highest
