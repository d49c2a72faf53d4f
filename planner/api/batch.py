"""Default of `--batch`: number of samples per optimizer step."""

from math import ceil

from planner.core.values.profile import Profile


def default_batch(profile: Profile, devices: int) -> int:
    """Return the smallest multiple of the largest profiled size that has at least one sample per device."""
    largest = max(profile.micro_batch_sizes)
    return largest * max(1, ceil(devices / largest))


def default_batch_note(profile: Profile, batch: int) -> str:
    """Return a note that states the assumed batch, and how to set another one."""
    assumed = f"no `--batch`: planning for {batch} samples per step"
    if batch == max(profile.micro_batch_sizes):
        return f"{assumed}, the largest profiled size"
    return f"{assumed}, about one per device; training usually has more: `--batch {8 * batch} --replicas auto`"
