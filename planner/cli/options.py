"""Options that several commands share, and how their text becomes values."""

from math import inf
from typing import Annotated

import typer

from planner.core.cluster import Link
from planner.core.errors import UsageError
from planner.core.units import parse_bytes, parse_bytes_per_s, parse_us

__all__ = ["Debug", "Format", "Quiet", "caps", "check_format", "integers", "link", "names", "speeds"]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results, warnings and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Format = Annotated[str, typer.Option("--format", metavar="text|json", help="How to print the result.")]


def check_format(name: str) -> bool:
    """Whether JSON is wanted.

    Raises:
        UsageError: Neither text nor json.
    """
    if name not in ("text", "json"):
        raise UsageError(f"unknown `--format {name}`", hint="one of text, json")
    return name == "json"


def integers(option: str, text: str, *, least: int = 1) -> tuple[int, ...]:
    """`1,2,4` as numbers.

    Raises:
        UsageError: Something else, or a number below `least`.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"expected whole numbers with commas between them, got `{option} {text}`") from None
    if min(numbers) < least:
        raise UsageError(f"`{option} {text}`: {min(numbers)} is below {least}")
    return numbers


def caps(text: str, devices: int) -> tuple[int, ...]:
    """`8GB` for every device, or `24GB,24GB,80GB` one by one, in bytes.

    Raises:
        UsageError: Not sizes, or not as many as devices.
    """
    sizes = tuple(parse_bytes(part) for part in text.split(","))
    if len(sizes) not in (1, devices):
        raise UsageError(f"`--mem {text}` names {len(sizes)} caps for {devices} devices", hint="give one, or one each")
    return sizes * devices if len(sizes) == 1 else sizes


def speeds(text: str, devices: int) -> tuple[float, ...]:
    """`1,1,2.5`: one for each device, or one for all.

    Raises:
        UsageError: Not numbers above 0, or not as many as devices.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"expected numbers with commas between them, got `--speed {text}`") from None
    if not all(0 < number < inf for number in numbers):
        raise UsageError(f"`--speed {text}`: a speed is above 0", hint="1 is the profiled device, 2 is twice as fast")
    if len(numbers) not in (1, devices):
        raise UsageError(f"`--speed {text}` names {len(numbers)} speeds for {devices} devices", hint="give one each")
    return numbers * devices if len(numbers) == 1 else numbers


def names(option: str, text: str) -> tuple[str, ...]:
    """`wte,lm_head`: two or more layers.

    Raises:
        UsageError: Fewer than two different ones.
    """
    layers = tuple(part.strip() for part in text.split(","))
    if len(set(layers)) < 2 or len(set(layers)) < len(layers):
        raise UsageError(f"expected different layers with commas between them, got `{option} {text}`")
    return layers


def link(text: str, option: str = "--link") -> Link:
    """`25GB/s`, `25GB/s,5us` or `1GB/s,100us,blocking`.

    Raises:
        UsageError: Something else.
    """
    rate, _, rest = text.partition(",")
    latency, _, mode = rest.partition(",")
    if mode not in ("", "blocking"):
        raise UsageError(f"unknown kind of link `{mode}` in `{option} {text}`", hint="`blocking`, or nothing")
    return Link(
        bytes_per_s=parse_bytes_per_s(rate),
        latency_us=parse_us(latency) if latency else 0.0,
        blocking=mode == "blocking",
    )
