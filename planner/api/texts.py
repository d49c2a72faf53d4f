"""Options, as text from a command line or as values from Python, made into values of the core.

Each function takes either form, and raises a `UsageError` that names the option for anything else.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, get_args

from planner.core.errors import UsageError
from planner.core.values.cluster import Link
from planner.core.values.devices import ACCELERATORS
from planner.core.values.limits import LARGEST, MOST_DEVICES, RATES, SPEEDS, at_most, short
from planner.core.values.precision import PRECISIONS, Precision, precision_of
from planner.core.values.units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_share, parse_us

File = str | os.PathLike[str]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much there is (0 while that is not known)."""

Numbers = str | int | Sequence[int]
"""`1,2,4`, or the numbers."""

Sizes = str | int | Sequence[str | int]
"""`24GB,24GB,80GB`, or each as `24GB` or as a number of bytes."""


def choice(option: str, text: str, choices: object) -> str:
    """`text`, if it is one of `choices`: a tuple of texts, or a literal type."""
    allowed = choices if isinstance(choices, tuple) else get_args(choices)
    if text not in allowed:
        raise UsageError(f"unknown `{option} {text}`", hint=f"one of {', '.join(allowed)}")
    return text


def integers(option: str, asked: Numbers) -> tuple[int, ...]:
    """`1,2,4` as numbers of at least 1."""
    text = _shown(asked)
    try:
        numbers = tuple(map(int, _parts(asked)))
    except (TypeError, ValueError):
        raise UsageError(f"expected whole numbers with commas between them, got `{option} {text}`") from None
    if not numbers:
        raise UsageError(f"expected whole numbers, got none for `{option}`")
    if min(numbers) < 1:
        raise UsageError(f"`{option} {text}`: {short(min(numbers))} is below 1")
    if max(numbers) > LARGEST:
        raise UsageError(f"`{option} {text}` is too large to compute with")
    return numbers


def one(option: str, asked: Numbers) -> int:
    """One number of at least 1."""
    numbers = integers(option, asked)
    if len(numbers) > 1:
        raise UsageError(f"expected one number, got `{option} {_shown(asked)}`")
    return numbers[0]


def count_or_auto(option: str, asked: str | int) -> int:
    """A count, or 0 for `auto`, where the solver may choose."""
    return 0 if asked == "auto" else one(option, asked)


def number_of(option: str, asked: int, noun: str, most: int | None = None) -> int:
    """The number of what `noun` says, from 1 to `most`, if that is bounded."""
    if asked < 1:
        raise UsageError(f"`{option} {short(asked)}`: at least 1 {noun} is needed")
    return asked if most is None else at_most(option, asked, most, f"{noun}s")


def device_counts(asked: Numbers) -> tuple[int, ...]:
    """`8`, or `8,6,4`: numbers of devices, most first."""
    try:
        counts = tuple(map(int, _parts(asked)))
    except (TypeError, ValueError):
        raise UsageError(
            f"`--devices {_shown(asked)}`: expected an integer, or several with commas between them"
        ) from None
    if not counts or len(set(counts)) < len(counts):
        raise UsageError(f"expected different numbers of devices, got `--devices {_shown(asked)}`")
    return tuple(sorted((number_of("--devices", count, "device", MOST_DEVICES) for count in counts), reverse=True))


def device_count(asked: Numbers) -> int:
    """One number of devices."""
    counts = device_counts(asked)
    if len(counts) > 1:
        raise UsageError(
            f"`--devices {_shown(asked)}`: one plan is for one number of devices",
            hint="`planner.solve_family` makes a plan for each",
        )
    return counts[0]


def size(asked: str | int) -> int:
    """`8GB`, or an accelerator's name (`tpu:v2`), in bytes; from Python also a number of bytes."""
    if isinstance(asked, str):
        named = next((one for one in ACCELERATORS if one.name == asked.strip().lower()), None)
        return parse_bytes(asked) if named is None else named.memory_bytes
    if not 0 <= asked <= LARGEST:
        raise UsageError(f"a size is from 0 to 2^60 bytes, got {short(asked)}")
    return asked


def sizes(asked: Sizes) -> tuple[int, ...]:
    """Several sizes in bytes."""
    return tuple(map(size, _parts(asked)))


def caps(asked: Sizes, devices: int) -> tuple[int, ...]:
    """`8GB` for every device, or `24GB,24GB,80GB` one by one, in bytes."""
    one_or_each = sizes(asked)
    if len(one_or_each) not in (1, devices):
        raise UsageError(
            f"`--mem {_shown(asked)}` names {len(one_or_each)} caps for {devices} devices", hint="give one, or one each"
        )
    return one_or_each * devices if len(one_or_each) == 1 else one_or_each


def micro_batch_sizes(asked: Numbers, batch: int | None) -> tuple[int, ...]:
    """The sizes to profile, in ascending order: `1,2,4`, or for `auto` powers of two up to the batch (8), and it."""
    if asked != "auto":
        if batch is not None:
            raise UsageError(f"`--batch {batch}` and `--batch-sizes {_shown(asked)}`: give one of them")
        return tuple(sorted(set(integers("--batch-sizes", asked))))
    most = 8 if batch is None else number_of("--batch", batch, "sample")
    # The batch itself too, so that every number that divides it lies between measured sizes.
    return (*(2**n for n in range(most.bit_length()) if 2**n < most), most)


def precision(asked: str | None) -> Precision:
    """`bf16-mixed` and so on; empty where nothing is asked."""
    if asked is None:
        return ""
    if not precision_of(asked):
        raise UsageError(f"unknown precision `--dtype {asked}`", hint=f"one of {', '.join(PRECISIONS)}")
    return precision_of(asked)


def speeds(asked: str | float | Sequence[float], devices: int) -> tuple[float, ...]:
    """`1,1,2.5`: a number above 0 for each device, or one for all."""
    text = _shown(asked)
    try:
        numbers = tuple(map(float, _parts(asked)))
    except ValueError:
        raise UsageError(f"expected numbers with commas between them, got `--speed {text}`") from None
    slowest, fastest = SPEEDS
    if not all(0 < number < inf for number in numbers):
        raise UsageError(f"`--speed {text}`: a speed is above 0", hint="1 is the profiled device, 2 is twice as fast")
    if not all(slowest <= number <= fastest for number in numbers):
        raise UsageError(f"`--speed {text}`: a speed is from {slowest:g} to {fastest:g} times the profiled device's")
    if len(numbers) not in (1, devices):
        raise UsageError(f"`--speed {text}` names {len(numbers)} speeds for {devices} devices", hint="give one each")
    return numbers * devices if len(numbers) == 1 else numbers


def names(option: str, asked: str | Sequence[str]) -> tuple[str, ...]:
    """`wte,lm_head`: two or more different layers."""
    layers = tuple(part.strip() for part in _parts(asked))
    if len(set(layers)) < 2 or len(set(layers)) < len(layers):
        raise UsageError(f"expected different layers with commas between them, got `{option} {_shown(asked)}`")
    return layers


def link(asked: str | Link, option: str = "--link") -> Link:
    """`25GB/s`, `25GB/s,5us` or `1GB/s,100us,blocking`."""
    if isinstance(asked, Link):
        return asked
    rate, _, rest = asked.partition(",")
    latency, _, mode = rest.partition(",")
    if mode not in ("", "blocking"):
        raise UsageError(f"unknown kind of link `{mode}` in `{option} {asked}`", hint="`blocking`, or nothing")
    return Link(
        bytes_per_s=parse_bytes_per_s(rate),
        latency_us=parse_us(latency) if latency else 0.0,
        blocking=mode == "blocking",
    )


def flops_per_s(asked: str | float) -> float:
    """`190TFLOP/s` as a number; from Python also a number of operations per second."""
    if isinstance(asked, str):
        return parse_flops_per_s(asked)
    slowest, fastest = RATES
    if not slowest <= asked <= fastest:
        raise UsageError(f"a rate is from 1 FLOP/s to 10^18 FLOP/s, got {asked}")
    return float(asked)


def share(asked: str | float) -> float:
    """`5%` as a fraction, from 0 to below 1; from Python also 0.05."""
    if isinstance(asked, str):
        return parse_share(asked)
    if not 0 <= asked < 1:
        raise UsageError(f"a share is at least 0 and below 1, got {asked}", hint="0.05 is 5%")
    return asked


def two_shares(option: str, asked: str | Sequence[str | float]) -> tuple[float, float]:
    """`1%,5%`, or the two shares."""
    shares = _parts(asked)
    if len(shares) != 2:
        raise UsageError(f"`{option} {_shown(asked)}`: two shares are needed", hint=f"`{option} 1%,5%`")
    return share(shares[0]), share(shares[1])


def nodes(asked: str) -> tuple[int, int]:
    """`4x8`: how many nodes, and how many devices in each."""
    parts = re.fullmatch(r"([1-9]\d{0,9})x([1-9]\d{0,9})", asked, re.ASCII)
    if parts is None:
        raise UsageError(f"expected nodes times devices as in `--nodes 4x8`, got `--nodes {short(asked)}`")
    at_most("--nodes", int(parts[1]) * int(parts[2]), MOST_DEVICES, "devices")
    return int(parts[1]), int(parts[2])


def settings(asked: Mapping[str, object] | Sequence[str]) -> dict[str, str]:
    """`width=16` and so on, or the values by name, as texts by name."""
    if isinstance(asked, Mapping):
        return {name: str(value) for name, value in asked.items()}
    pairs = [text.partition("=") for text in asked]
    for name, equals, _ in pairs:
        if not equals:
            raise UsageError(f"expected `--set name=value`, got `--set {name}`")
    return {name: value for name, _, value in pairs}


def _parts(asked: Any) -> Sequence[Any]:
    """What commas part in a text, or the values; a number is one value."""
    if isinstance(asked, str):
        return asked.split(",")
    return [asked] if isinstance(asked, (int, float)) else asked


def _shown(asked: object) -> str:
    return short(",".join(map(short, asked[:40])) if isinstance(asked, (list, tuple)) else short(asked), 80)
