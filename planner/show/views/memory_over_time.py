"""Memory of every device over a step, in equal intervals of time."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from planner.show.step import MemoryLevel, StepTimeline


def memory_over_time(step: StepTimeline, *, columns: int, end_us: float) -> list[list[int]]:
    """Return each device's highest memory in each of several equal intervals of time.

    Args:
        step: The step.
        columns: Number of intervals from 0 to `end_us`.
        end_us: End of the last interval in microseconds, above 0.

    Returns:
        For each device, the bytes of each interval.
    """
    return [_highest(levels, columns, end_us) for levels in step.memory]


def _highest(levels: Sequence[MemoryLevel], columns: int, end_us: float) -> list[int]:
    highest = [0] * columns
    ends = [*(after.start_us for _, after in pairwise(levels)), end_us]
    for level, until_us in zip(levels, ends, strict=True):
        # A level without duration still counts in its interval.
        first = int(level.start_us / end_us * columns)
        last = max(first + 1, ceil(min(until_us, end_us) / end_us * columns - 1e-9))
        for column in range(first, min(last, columns)):
            highest[column] = max(highest[column], level.bytes)
    return highest
