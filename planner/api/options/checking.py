"""Options of `check`."""

from dataclasses import dataclass
from typing import Annotated, Final

from planner.api.option import Option
from planner.api.texts import File, Numbers, Sizes
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

_ELSEWHERE: Final = "Other devices or cuts"
_SINCE: Final = "Changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of `check`."""

    mem: Annotated[
        Sizes | None, Option("8GB", "Check against this memory limit instead of the plan's.", _ELSEWHERE)
    ] = None
    device: Annotated[str | None, Option("h100", "Check against the memory of this accelerator.", _ELSEWHERE)] = None
    headroom: Annotated[
        str | float,
        Option(
            "5%|auto",
            "Warn if less than this share of memory stays free; auto: largest error of earlier predictions.",
        ),
    ] = "0%"
    balance: Annotated[
        Numbers | File | None,
        Option("6,6,6,6|FILE", "Check these cuts (layers per stage) instead of the plan's.", _ELSEWHERE),
    ] = None
    model: Annotated[
        File | None,
        Option("MODEL.py[:ENTRY]", "Check that the model has not changed since it was profiled (needs torch).", _SINCE),
    ] = None
    against: Annotated[
        File | Plan | None,
        Option("PLAN|git:REV", "Compare with another plan, or with this plan as it was at a git revision.", _SINCE),
    ] = None
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    strict: Annotated[bool, Option("", "Treat warnings as errors.")] = False
