"""Limits of the size of a request. Larger requests would take hours or all memory, and exceed any real machine."""

from planner.core.errors import UsageError

LARGEST = 2**60
"""Largest number of bytes, microseconds or other units in computations."""

MOST_DEVICES = 2**16
MOST_BATCH = 10**9
MOST_MICRO_BATCHES = 2**14

MOST_CHUNKS = 4
"""Most chunks per device that the search tries; more chunks rarely save as much time as their transfers cost."""

MOST_ACTIONS = 2**19
"""Largest product of stages and micro-batches of a pipeline that is simulated and drawn."""

SPEEDS = (1e-6, 1e6)
"""Range of device speeds relative to the profiled device."""

BANDWIDTHS = (1.0, 1e18)
"""Range of link bandwidths, in bytes per second."""

PRICES = (1e-6, 1e6)
"""Range of prices of a GPU-hour."""


def check_limit(option: str, value: int, limit: int, plural: str) -> int:
    """Return `value` if it is at most `limit`.

    Args:
        option: Name of the option.
        value: Its value.
        limit: Largest allowed value.
        plural: Noun for the message: `devices`.

    Raises:
        UsageError: The value exceeds the limit.
    """
    if value > limit:
        raise UsageError(f"`{option} {truncate(value)}`: at most {limit} {plural} are supported")
    return value


def truncate(value: object, most: int = 40) -> str:
    """Return a value as text, cut off after `most` characters."""
    # Python refuses to write integers of more than 4300 decimal digits.
    text = f"{value:#x}" if isinstance(value, int) and abs(value) >= 10**30 else str(value)
    return text if len(text) <= most else f"{text[:most]}…"
