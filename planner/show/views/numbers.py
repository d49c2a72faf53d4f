"""Numbers as text: times in one unit, time axes, percentages, differences, links, names of layers."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10

from planner.core.values.cluster import Link
from planner.core.values.units import format_rate, format_us

NOTHING = "-"
"""Text for a missing number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """Unit of time for all numbers of a column."""

    unit: str
    factor: float
    """Number of microseconds per unit."""
    decimals: int

    @classmethod
    def fitting(cls, times_us: Iterable[float]) -> "TimeUnit":
        """Return the unit, including its number of decimals, for a column with these times."""
        largest = max(times_us, default=0.0)
        unit, factor = ("us", 1.0) if largest < 1e3 else ("ms", 1e3) if largest < 1e7 else ("s", 1e6)
        decimals = next((d for d, limit in ((3, 10), (2, 100)) if largest / factor < limit), 1)
        return cls(unit=unit, factor=factor, decimals=1 if unit == "us" else decimals)

    def text(self, time_us: float) -> str:
        """Return a time as a number in this unit, without the unit's name."""
        return f"{time_us / self.factor:.{self.decimals}f}"


def percent(share: float, *, decimals: int = 1) -> str:
    """Return a fraction as a percentage: `17.9 %` for 0.179."""
    # Adding 0.0 turns -0.0, which rounding may leave, into 0.0.
    return f"{round(share * 100, decimals) + 0.0:.{decimals}f} %"


def rate_text(per_s: float) -> str:
    """Return a rate per second as text, with two significant digits below 0.1."""
    if 0 < per_s < 0.1:
        return f"{per_s:.{1 - floor(log10(per_s))}f}"
    return f"{per_s:,.{1 if per_s < 1000 else 0}f}"


def percent_difference(predicted: float, measured: float) -> str:
    """Return the difference of `measured` from `predicted`, with sign, in percent of `predicted`."""
    if not predicted:
        return NOTHING
    return f"{(measured - predicted) / predicted * 100:+.1f} %"


def format_count(count: float) -> str:
    """Return a large number with three digits and a decimal prefix, as `1.75 G`."""
    value, prefixes = float(count), iter("kMGTPE")
    prefix = ""
    while abs(value) >= 999.5:
        value, prefix = value / 1000, next(prefixes)
    if not prefix:
        return f"{value:.0f}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {prefix}"


def layer_range(first: str, last: str, count: int | None = None) -> str:
    """Return the name of a range of layers, as `block_0 … block_7 (8)`.

    Args:
        first: Name of the first layer.
        last: Name of the last layer.
        count: Number of layers; left out if None.
    """
    names = first if first == last else f"{first} … {last}"
    return names if count is None else f"{names} ({count})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Mark on a time axis."""

    time_us: float
    label: str


def time_ticks(total_us: float, max_intervals: float) -> tuple[str, tuple[Tick, ...]]:
    """Return the unit and at most `max_intervals` + 1 marks of a time axis from 0 to `total_us`."""
    step_us = _nice(total_us / max_intervals)
    scale = TimeUnit.fitting([total_us])
    count = floor(total_us / step_us * (1 + 1e-9)) + 1
    ticks = (Tick(time_us=n * step_us, label=f"{n * step_us / scale.factor:g}") for n in range(count))
    return scale.unit, tuple(ticks)


def _nice(least: float) -> float:
    power: float = 10.0 ** ceil(log10(least))
    return next(power * part for part in (0.2, 0.5, 1.0) if power * part >= least * (1 - 1e-9))


_METHODS = {
    "dynamic-programming": "dynamic program",
    "integer-programming": "integer program",
    "simulated": "bounds and simulation",
}


def solver_method_label(method: str) -> str:
    """Return a solver method's name in words; unknown methods keep their names."""
    return _METHODS.get(method, method)


def row_noun(chunks: int) -> str:
    """Return the word for a table row: `stage` if every device has one stage, else `device`."""
    return "stage" if chunks == 1 else "device"


def not_measured_warning(how: str) -> str:
    """Return a warning that a compiler or a formula predicted the numbers; empty if `how` is `measured`."""
    return "" if how == "measured" else f"{how}, not measured: profile on the device before you rely on these numbers"


def link_description(link: Link) -> str:
    """Return bandwidth and latency of a link as text: `25.0 GB/s, 5.00 us, not overlapping with compute`."""
    bandwidth = format_rate(link.bytes_per_s) if link.bytes_per_s else "unlimited"
    return f"{bandwidth}, {format_us(link.latency_us)}{', not overlapping with compute' if link.blocking else ''}"
