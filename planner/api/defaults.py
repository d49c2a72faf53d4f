"""Defaults of options that depend on the profile: headroom and batch."""

from collections.abc import Sequence
from math import ceil

from planner.api import texts
from planner.core.values.profile import Profile

AUTO = "auto"


def headroom_of(headroom: str | float | None, profile: Profile, limits: Sequence[int]) -> float:
    """Return the headroom (share of memory to keep free) as a fraction, from 0 to below 1.

    Args:
        headroom: `5%`, 0.05, or `auto`, which covers the largest known error of predicted peaks. None means `auto` for
            an estimated profile, and 0 for others.
        profile: The profile to plan from.
        limits: Memory limits of the devices, in bytes.

    Raises:
        UsageError: The text is not a share. Also raised for `auto` if errors are unknown for the kind of profile.
    """
    if headroom is None and profile.device.how != "estimated":
        return 0.0
    if headroom not in (AUTO, None):
        return texts.parse_fraction("--headroom", headroom)
    from planner.core.judge.certainty import headroom_for  # noqa: PLC0415 - numpy, and rarely needed

    return headroom_for(profile, limits)


def default_batch(profile: Profile, devices: int) -> int:
    """Return the default mini-batch: a multiple of the largest profiled micro-batch size, and at least `devices`."""
    largest = max(profile.micro_batch_sizes)
    return largest * max(1, ceil(devices / largest))


def default_batch_note(profile: Profile, batch: int) -> str:
    """Return a note that states the assumed batch, and how to set another one."""
    assumed = f"no `--batch`: planning for {batch} samples per step"
    if batch == max(profile.micro_batch_sizes):
        return f"{assumed}, the largest profiled size"
    return f"{assumed}, about one per device; training usually has more: `--batch {8 * batch} --replicas auto`"
