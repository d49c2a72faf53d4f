"""Time axes of pictures: round ticks, and labels in one unit."""

from dataclasses import dataclass
from math import ceil, floor, log10

from planner.show.views.numbers import TimeScale

__all__ = ["Tick", "nice", "time_ticks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on the axis."""

    time_us: float
    label: str


def nice(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power: float = 10.0 ** ceil(log10(least))
    return next(power * part for part in (0.2, 0.5, 1.0) if power * part >= least * (1 - 1e-9))


def time_ticks(total_us: float, most: int) -> tuple[str, tuple[Tick, ...]]:
    """The unit and at most `most` + 1 round times from 0 to `total_us`, which is above 0."""
    step_us = nice(total_us / most)
    scale = TimeScale.fitting([total_us])
    count = floor(total_us / step_us * (1 + 1e-9)) + 1
    ticks = (Tick(time_us=n * step_us, label=f"{n * step_us / scale.factor:g}") for n in range(count))
    return scale.unit, tuple(ticks)
