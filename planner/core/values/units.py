"""Quantities with units, parsed from options and printed for people.

Decimal and binary prefixes differ (`8GB` = 8·10^9 B, `8GiB` = 8·2^30 B). A number without a unit is rejected, because
`--mem 8` is ambiguous. In error messages, parsers write their argument `error_prefix` (such as `--mem `)
before the quantity.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from planner.core.errors import UsageError
from planner.core.values.limits import BANDWIDTHS, LARGEST, truncate

_BYTES = {
    "b": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgtp", 1)},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgtp", 1)},
}
_TIMES_US = {"us": Fraction(1), "µs": Fraction(1), "μs": Fraction(1), "ms": Fraction(1000), "s": Fraction(1_000_000)}
_FLOPS = {f"{p}flop": 1000**n for n, p in enumerate(("", "k", "m", "g", "t", "p"))}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12, "P": 10**15}
_QUANTITY = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-zµμ/%]*)\s*")


def parse_bytes(text: str, error_prefix: str = "") -> int:
    """Return a size such as `8GB`, `7.5GiB`, `512 MiB` in bytes, rounded down to a whole byte.

    Raises:
        UsageError: The text is not a number with a unit of bytes.
    """
    number, unit = _split(text, "8GB or 7.5GiB", error_prefix)
    factor = _BYTES.get(unit.lower())
    if factor is None:
        units = "use one of B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"
        raise _unit_error(error_prefix + text, unit, "a size", units, sample="8GB or 7.5GiB")
    size_bytes: int = math.floor(_bounded(number * factor, error_prefix + text))
    return size_bytes


def parse_bytes_per_s(text: str, error_prefix: str = "") -> float:
    """Return a rate such as `25GB/s` in bytes per second.

    Raises:
        UsageError: The text is not a number with a unit of bytes per second, or the number is zero.
    """
    units = "use one of B/s, kB/s, MB/s, GB/s, TB/s, KiB/s … TiB/s"
    return _parse_rate(text, _BYTES, error_prefix, numerator="B", units=units, sample="25GB/s")


def parse_flops_per_s(text: str, error_prefix: str = "") -> float:
    """Return a rate such as `190TFLOP/s` in floating-point operations per second.

    Raises:
        UsageError: The text is not a number with a unit of operations per second, or the number is zero.
    """
    units = "use one of GFLOP/s, TFLOP/s, PFLOP/s"
    return _parse_rate(text, _FLOPS, error_prefix, numerator="FLOP", units=units, sample="190TFLOP/s")


def parse_us(text: str, error_prefix: str = "") -> float:
    """Return a duration such as `5us`, `1.5ms`, `60s` in microseconds.

    Raises:
        UsageError: The text is not a number with a unit of time.
    """
    number, unit = _split(text, "5us or 1.5ms", error_prefix)
    factor = _TIMES_US.get(unit)
    if factor is None:
        raise _unit_error(error_prefix + text, unit, "a time", "use one of us, ms, s", sample="5us or 1.5ms")
    return float(_bounded(number * factor, error_prefix + text))


def parse_share(text: str, error_prefix: str = "") -> float:
    """Return a share such as `5%` as a fraction of one (0.05).

    Raises:
        UsageError: The text is not a percentage from 0 % to below 100 %.
    """
    number, unit = _split(text, "5%", error_prefix)
    if unit != "%":
        raise _unit_error(error_prefix + text, unit, "a share", "add the percent sign", sample="5%")
    if number >= 100:
        raise UsageError(f"a share must be below 100%: `{error_prefix}{text}`")
    return float(number / 100)


def parse_count(text: str, error_prefix: str = "") -> int:
    """Return a large number such as `1T` or `300M`, rounded up to a whole number.

    Raises:
        UsageError: The text is not a number such as `1500` or `1T`, or the number is zero.
    """
    number, prefix = _split(text, "1T or 300M", error_prefix)
    factor = _COUNTS.get(prefix.upper())
    if factor is None:
        raise _unit_error(error_prefix + text, prefix, "a number", "use one of k, M, B, G, T, P", sample="1T or 300M")
    if number == 0:
        raise UsageError(f"a number must not be zero: `{error_prefix}{text}`")
    count: int = math.ceil(_bounded(number * factor, error_prefix + text))
    return count


def format_count(count: int) -> str:
    """Return a large number as text that `parse_count` reads back: `1T`, `1500`."""
    for prefix in "PTBMK":
        if count % _COUNTS[prefix] == 0:
            return f"{count // _COUNTS[prefix]}{'k' if prefix == 'K' else prefix}"
    return str(count)


def bytes_option(size_bytes: int) -> str:
    """Return a size as an option's value with at most two decimals, never below the size: `8.21GB`."""
    for unit, factor in _DECIMAL:
        if size_bytes >= factor:
            return _two_decimals(-(-size_bytes * 100 // factor), unit)
    return f"{size_bytes}B"


def exact_bytes_option(size_bytes: int) -> str:
    """Return a size as an option's value, exact to the byte: `8GB`, `1.5GiB`, `8000000001B`."""
    binary = tuple((f"{p}iB", 1024**n) for n, p in ((4, "T"), (3, "G"), (2, "M"), (1, "K")))
    for unit, factor in (*_DECIMAL, *binary):
        if size_bytes >= factor and size_bytes * 100 % factor == 0:
            return _two_decimals(size_bytes * 100 // factor, unit)
    return f"{size_bytes}B"


def format_bytes(size_bytes: float) -> str:
    """Return bytes as text in binary units with three significant digits: `7.45 GiB`."""
    return _in_units(float(size_bytes), 1024, _SIZE_UNITS)


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth as text in decimal units: `25.0 GB/s`."""
    return _in_units(float(bytes_per_s), 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_speed(samples_per_s: float) -> str:
    """Return samples per second as text: `1,234 samples/s`."""
    text = f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
    return f"{text} samples/s"


def format_us(time_us: float) -> str:
    """Return microseconds as text, in the most readable unit: `812 ms`."""
    return _in_units(float(time_us), 1000, _TIME_UNITS)


def unit_of_us(time_us: float) -> tuple[float, str]:
    """Return the unit in which `format_us` writes `time_us`: microseconds per unit, and the unit's name."""
    return _in_largest_unit(float(time_us), 1000, _TIME_UNITS)[1:]


def unit_of_bytes(size_bytes: float) -> tuple[float, str]:
    """Return the unit in which `format_bytes` writes `size_bytes`: bytes per unit, and the unit's name."""
    return _in_largest_unit(float(size_bytes), 1024, _SIZE_UNITS)[1:]


_LONGEST = 100
"""Largest number of characters of a quantity."""

_TIME_UNITS = ("us", "ms", "s")
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_DECIMAL = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def _two_decimals(hundredths: int, unit: str) -> str:
    whole, rest = divmod(hundredths, 100)
    return f"{whole}{f'.{rest:02d}'.rstrip('0') if rest else ''}{unit}"


def _parse_rate(
    text: str, factors: Mapping[str, int], error_prefix: str, *, numerator: str, units: str, sample: str
) -> float:
    number, unit = _split(text, sample, error_prefix)
    amount, slash, per = unit.partition("/")
    factor = factors.get(amount.lower())
    if factor is None or slash == "" or per.lower() != "s":
        raise _unit_error(error_prefix + text, unit, "a rate", units, sample=sample)
    if number == 0:
        raise UsageError(f"a rate must not be zero: `{error_prefix}{text}`")
    if not BANDWIDTHS[0] <= number * factor <= BANDWIDTHS[1]:
        raise UsageError(f"a rate is from 1 {numerator}/s to 10^18 {numerator}/s, got `{error_prefix}{truncate(text)}`")
    return float(number * factor)


def _split(text: str, sample: str, error_prefix: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        problem = f"not a quantity: `{error_prefix}{truncate(text)}`"
        raise UsageError(problem, hint=f"write a number with its unit, such as {sample}")
    return Fraction(match["number"]), match["unit"]


def _bounded(value: Fraction, text: str) -> Fraction:
    if value > LARGEST:
        raise UsageError(f"`{truncate(text)}` is too large to compute with")
    return value


def _unit_error(text: str, unit: str, quantity: str, units: str, *, sample: str) -> UsageError:
    problem = "has no unit" if unit == "" else f"has the unknown unit `{unit}`"
    return UsageError(f"{quantity} is needed, `{text}` {problem}", hint=f"{units}: for example {sample}")


def _in_units(value: float, step: int, units: tuple[str, ...]) -> str:
    value, _, unit = _in_largest_unit(value, step, units)
    text = f"{value:.0f}" if unit == "B" else _three_digits(value)
    return f"{text} {unit}"


def _in_largest_unit(value: float, step: int, units: tuple[str, ...]) -> tuple[float, float, str]:
    index = 0
    while index < len(units) - 1 and abs(float(_three_digits(value))) >= step:
        value, index = value / step, index + 1
    return value, float(step**index), units[index]


def _three_digits(value: float) -> str:
    return f"{value:.{decimals_for_three_digits(value)}f}"


def decimals_for_three_digits(value: float) -> int:
    """Return the number of decimals, at most 2, for three significant digits: 2 for 1.23, 1 for 12.3, 0 for 123."""
    for digits in (2, 1):
        if len(f"{value:.{digits}f}".lstrip("-").replace(".", "")) <= 3:
            return digits
    return 0


def pluralize(count: int, noun: str, plural: str = "s") -> str:
    """Return a number followed by a noun in singular or plural: `1 stage`, `4 micro-batches`."""
    return f"{count} {noun}{'' if count == 1 else plural}"
