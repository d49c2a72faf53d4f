"""How large a question may be: beyond it the answer would take hours or all memory, and nobody has such a machine."""

from planner.core.errors import UsageError

LARGEST = 2**60
"""The largest number of bytes, microseconds or anything else that is computed with."""

MOST_DEVICES = 2**16
MOST_BATCH = 10**9
MOST_MICRO_BATCHES = 2**14

MOST_ACTIONS = 2**19
"""Stages times micro-batches of one pipeline: what a step is simulated and drawn with."""

SPEEDS = (1e-6, 1e6)
"""How many times faster or slower than the profiled device another may be."""

RATES = (1.0, 1e18)
"""Bytes per second that a link may move."""


def at_most(option: str, value: int, limit: int, what: str) -> int:
    """`value`, if it is no more than is planned for.

    Raises:
        UsageError: It is more.
    """
    if value > limit:
        raise UsageError(f"`{option} {short(value)}`: at most {limit} {what} are planned for")
    return value


def short(value: object, most: int = 40) -> str:
    """A number or a text as it was given, or its beginning where it is long."""
    # Python writes no integer of more than 4300 digits.
    text = f"{value:#x}" if isinstance(value, int) and abs(value) >= 10**30 else str(value)
    return text if len(text) <= most else f"{text[:most]}…"
