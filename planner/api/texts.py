"""Parsing of options, given as text on the command line or as Python values.

Each function takes both forms, and raises `UsageError` for invalid values.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final, TypeVar, get_args

from planner.core.errors import UsageError
from planner.core.values.cluster import Link
from planner.core.values.devices import ACCELERATORS
from planner.core.values.limits import BANDWIDTHS, LARGEST, MOST_DEVICES, PRICES, SPEEDS, check_limit, truncate
from planner.core.values.precision import PRECISIONS, Precision, precision_option_of
from planner.core.values.units import (
    parse_bytes,
    parse_bytes_per_s,
    parse_count,
    parse_flops_per_s,
    parse_share,
    parse_us,
)

File = str | os.PathLike[str]

Progress = Callable[[str, int, int], None]
"""Progress callback with the arguments task, done, total; a total of 0 means that the total is not known yet."""

Numbers = str | int | Sequence[int]
"""Numbers, or a text such as `1,2,4`."""

Sizes = str | int | Sequence[str | int]
"""Sizes in bytes or as text such as `24GB`, or one text such as `24GB,24GB,80GB`."""

_Number = TypeVar("_Number", int, float)

_UNLIMITED_BYTES_PER_S: Final = 10**18
"""Bandwidth that represents an unlimited link."""


def parse_choice(option: str, text: str, choices: object) -> str:
    """Return `text` if it is one of `choices`.

    Args:
        option: Name of the option.
        text: Its value.
        choices: A tuple of texts, or a literal type.

    Raises:
        UsageError: `text` is not one of `choices`.
    """
    allowed = choices if isinstance(choices, tuple) else get_args(choices)
    if text not in allowed:
        raise UsageError(f"unknown `{option} {text}`", hint=f"one of {', '.join(allowed)}")
    return text


def parse_duration_s(option: str, value: str) -> float:
    """Return a duration in seconds, from a text such as `60s`."""
    return parse_us(value, f"{option} ") / 1e6


def parse_integers(option: str, value: Numbers) -> tuple[int, ...]:
    """Return the numbers in a text such as `1,2,4`. Each must be at least 1."""
    text = _shown(value)
    try:
        numbers = tuple(map(int, _parts(value)))
    except (TypeError, ValueError):
        raise UsageError(f"expected whole numbers with commas between them, got `{option} {text}`") from None
    if not numbers:
        raise UsageError(f"expected whole numbers, got none for `{option}`")
    if min(numbers) < 1:
        raise UsageError(f"`{option} {text}`: {truncate(min(numbers))} is below 1")
    if max(numbers) > LARGEST:
        raise UsageError(f"`{option} {text}` is too large to compute with")
    return numbers


def parse_integer(option: str, value: Numbers) -> int:
    """Return the integer in a text such as `4`. It must be at least 1."""
    numbers = parse_integers(option, value)
    if len(numbers) > 1:
        raise UsageError(f"expected one number, got `{option} {_shown(value)}`")
    return numbers[0]


def parse_count_or_auto(option: str, value: str | int) -> int:
    """Return a count, or 0 for `auto`."""
    return 0 if value == "auto" else parse_integer(option, value)


def check_count(option: str, value: int, noun: str, most: int | None = None) -> int:
    """Return `value` if it is from 1 to `most`.

    Args:
        option: Name of the option.
        value: Its value.
        noun: Noun for the message, in the singular.
        most: Largest allowed value; None if there is none.

    Raises:
        UsageError: The number is outside of the range.
    """
    if value < 1:
        raise UsageError(f"`{option} {truncate(value)}`: at least 1 {noun} is needed")
    return value if most is None else check_limit(option, value, most, f"{noun}s")


def parse_device_counts(value: Numbers) -> tuple[int, ...]:
    """Return numbers of devices in descending order, from a text such as `8,6,4`."""
    try:
        counts = tuple(map(int, _parts(value)))
    except (TypeError, ValueError):
        raise UsageError(f"`--devices {_shown(value)}`: expected one integer, or several separated by commas") from None
    if not counts or len(set(counts)) < len(counts):
        raise UsageError(f"expected different numbers of devices, got `--devices {_shown(value)}`")
    return tuple(sorted((check_count("--devices", count, "device", MOST_DEVICES) for count in counts), reverse=True))


def parse_device_count(value: Numbers) -> int:
    """Return the number of devices from a text such as `8`. Raise `UsageError` for several numbers, such as `8,6`."""
    counts = parse_device_counts(value)
    if len(counts) > 1:
        raise UsageError(
            f"`--devices {_shown(value)}`: expected one number of devices",
            hint="use `planner.solve_family` for several",
        )
    return counts[0]


def parse_size_bytes(option: str, value: str | int) -> int:
    """Return a size in bytes, from a text such as `8GB`, a number, or the name of an accelerator.

    For a name such as `tpu:v2`, return the size of the accelerator's memory.
    """
    if isinstance(value, str):
        named = next((one for one in ACCELERATORS if one.name == value.strip().lower()), None)
        return parse_bytes(value, f"{option} ") if named is None else named.memory_bytes
    if not 0 <= value <= LARGEST:
        raise UsageError(f"a size is from 0 to 2^60 bytes, got `{option} {truncate(value)}`")
    return value


def parse_sizes_bytes(option: str, value: Sizes) -> tuple[int, ...]:
    """Return several sizes in bytes, from a text such as `24GB,80GB` or a list."""
    return tuple(parse_size_bytes(option, part) for part in _parts(value))


def parse_memory_limits(value: Sizes, devices: int) -> tuple[int, ...]:
    """Return each device's memory limit in bytes.

    `value` has one limit for all devices, such as `8GB`, or one per device, such as `24GB,24GB,80GB`.
    """
    return _one_per_device(parse_sizes_bytes("--mem", value), devices, f"--mem {_shown(value)}", noun="limit")


def parse_micro_batch_sizes(value: Numbers, batch: int | None) -> tuple[int, ...]:
    """Return the micro-batch sizes to profile, in ascending order.

    `auto` means `batch` and all smaller powers of two. If `batch` is None, the sizes are 1, 2, 4 and 8.
    """
    if value != "auto":
        if batch is not None:
            raise UsageError(f"`--batch {batch}` and `--batch-sizes {_shown(value)}`: give one of them")
        return tuple(sorted(set(parse_integers("--batch-sizes", value))))
    most = 8 if batch is None else check_count("--batch", batch, "sample")
    # The batch itself is included, so that each of its divisors is in the measured range.
    return (*(2**n for n in range(most.bit_length()) if 2**n < most), most)


def parse_precision(value: str | None) -> Precision:
    """Return the precision, such as `bf16-mixed`; empty for None."""
    if value is None:
        return ""
    if not precision_option_of(value):
        raise UsageError(f"unknown precision `--dtype {value}`", hint=f"one of {', '.join(PRECISIONS)}")
    return precision_option_of(value)


def parse_speeds(value: str | float | Sequence[float], devices: int) -> tuple[float, ...]:
    """Return the speed of each device relative to the profiled device.

    `value` has one speed for all devices, such as `2`, or one per device, such as `1,1,2.5`.
    """
    text = _shown(value)
    try:
        numbers = tuple(map(float, _parts(value)))
    except ValueError:
        raise UsageError(f"expected numbers with commas between them, got `--speed {text}`") from None
    slowest, fastest = SPEEDS
    if not all(0 < number < inf for number in numbers):
        raise UsageError(f"`--speed {text}`: a speed is above 0", hint="1 is the profiled device, 2 is twice as fast")
    if not all(slowest <= number <= fastest for number in numbers):
        raise UsageError(f"`--speed {text}`: a speed is from {slowest:g} to {fastest:g} times the profiled device's")
    return _one_per_device(numbers, devices, f"--speed {text}", noun="speed")


def parse_layer_names(option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return two or more different layer names, from a text such as `wte,lm_head` or a list."""
    layers = tuple(part.strip() for part in _parts(value))
    if len(set(layers)) < 2 or len(set(layers)) < len(layers):
        raise UsageError(f"expected different layers with commas between them, got `{option} {_shown(value)}`")
    return layers


def parse_link(value: str | Link, option: str = "--link") -> Link:
    """Return a link from a text such as `25GB/s,5us` or `1GB/s,100us,blocking`."""
    if isinstance(value, Link):
        return value
    rate, _, rest = value.partition(",")
    latency, _, mode = rest.partition(",")
    if mode not in ("", "blocking"):
        raise UsageError(f"unknown kind of link `{mode}` in `{option} {value}`", hint="use `blocking`, or remove it")
    return Link(
        bytes_per_s=parse_bytes_per_s(rate, f"{option} "),
        latency_us=parse_us(latency, f"{option} {rate},") if latency else 0.0,
        blocking=mode == "blocking",
    )


def link_text(link: Link) -> str:
    """Return a link as text that `parse_link` can read."""
    words = [f"{decimal_text(link.bytes_per_s or _UNLIMITED_BYTES_PER_S)}B/s", f"{decimal_text(link.latency_us)}us"]
    return ",".join([*words, *(["blocking"] if link.blocking else [])])


def decimal_text(value: float) -> str:
    """Return a number as text without exponent. The text gives the same number when it is read."""
    return f"{value:.15f}".rstrip("0").rstrip(".") if value < 1e15 else f"{value:.0f}"


def parse_rate(option: str, value: str | float) -> float:
    """Return operations per second, from a text such as `190TFLOP/s` or a number."""
    if isinstance(value, str):
        return parse_flops_per_s(value, f"{option} ")
    slowest, fastest = BANDWIDTHS
    if not slowest <= value <= fastest:
        raise UsageError(f"a rate is from 1 FLOP/s to 10^18 FLOP/s, got `{option} {value}`")
    return float(value)


def parse_large_count(option: str, value: str | int | None) -> int:
    """Return a large count, such as tokens, from `1T` or a number; 0 for None."""
    if value is None:
        return 0
    if isinstance(value, str):
        return parse_count(value, f"{option} ")
    return check_count(option, value, "unit", LARGEST)


def parse_price(option: str, value: str | float | None) -> float:
    """Return the price of a GPU-hour, in any currency; 0 for None."""
    if value is None:
        return 0.0
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"expected a number, got `{option} {truncate(value)}`") from None
    if not PRICES[0] <= number <= PRICES[1]:
        raise UsageError(f"a price is from {PRICES[0]:g} to {PRICES[1]:g}, got `{option} {truncate(value)}`")
    return number


def parse_fraction(option: str, value: str | float) -> float:
    """Return a fraction from 0 to below 1, from `5%` or 0.05."""
    if isinstance(value, str):
        return parse_share(value, f"{option} ")
    if not 0 <= value < 1:
        raise UsageError(f"a share is at least 0 and below 1, got `{option} {value}`", hint="0.05 is 5%")
    return value


def parse_two_fractions(option: str, value: str | Sequence[str | float]) -> tuple[float, float]:
    """Return two fractions, from `1%,5%` or a pair."""
    shares = _parts(value)
    if len(shares) != 2:
        raise UsageError(f"`{option} {_shown(value)}`: expected two shares", hint=f"`{option} 1%,5%`")
    return parse_fraction(option, shares[0]), parse_fraction(option, shares[1])


def parse_node_counts(value: str) -> tuple[int, int]:
    """Return number of nodes and devices per node, from a text such as `4x8`."""
    parts = re.fullmatch(r"([1-9]\d{0,9})x([1-9]\d{0,9})", value, re.ASCII)
    if parts is None:
        raise UsageError(f"expected nodes times devices as in `--nodes 4x8`, got `--nodes {truncate(value)}`")
    check_limit("--nodes", int(parts[1]) * int(parts[2]), MOST_DEVICES, "devices")
    return int(parts[1]), int(parts[2])


def parse_settings(value: Mapping[str, object] | Sequence[str]) -> dict[str, str]:
    """Return settings as a dict of texts, given a mapping or a list of texts such as `width=1024`."""
    if isinstance(value, Mapping):
        return {name: str(value) for name, value in value.items()}
    pairs = [text.partition("=") for text in value]
    for name, equals, _ in pairs:
        if not equals:
            raise UsageError(f"expected `--set name=value`, got `--set {name}`")
    return {name: value for name, _, value in pairs}


def _one_per_device(values: tuple[_Number, ...], devices: int, shown: str, *, noun: str) -> tuple[_Number, ...]:
    if len(values) not in (1, devices):
        raise UsageError(
            f"`{shown}` names {len(values)} {noun}s for {devices} devices", hint=f"give one {noun}, or one per device"
        )
    return values * devices if len(values) == 1 else values


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        return value.split(",")
    return [value] if isinstance(value, (int, float)) else value


def _shown(value: object) -> str:
    return truncate(",".join(map(truncate, value[:40])) if isinstance(value, (list, tuple)) else truncate(value), 80)
