"""How much of a cap stays free: as it is asked for, or, with `auto`, as much as peaks came out above predictions."""

from collections.abc import Sequence

from planner.api import texts
from planner.core.values.profile import Profile

AUTO = "auto"


def headroom_of(asked: str | float, profile: Profile, caps: Sequence[int]) -> float:
    """`5%` or 0.05 as a fraction, from 0 to below 1; `auto`: what the profile's kind of numbers asks for.

    Args:
        asked: As an option or a keyword has it.
        profile: What is planned from.
        caps: In bytes, of each device.

    Raises:
        UsageError: Not a share, or no peak has been measured beside one that was predicted from such a profile.
    """
    if asked != AUTO:
        return texts.share(asked)
    from planner.core.judge.certainty import headroom_for  # noqa: PLC0415 - numpy, and seldom asked for

    return headroom_for(profile, caps)
