"""What `check` takes beside the plan."""

from dataclasses import dataclass
from typing import Annotated, Final

from planner.api.option import Option
from planner.api.texts import File, Numbers, Sizes
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

_ELSEWHERE: Final = "On other devices, or cut elsewhere"
_SINCE: Final = "What changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What `check` takes beside the plan."""

    mem: Annotated[Sizes | None, Option("8GB", "Judge against this cap instead of the plan's.", _ELSEWHERE)] = None
    device: Annotated[
        str | None, Option("h100", "Judge against the memory of this accelerator instead.", _ELSEWHERE)
    ] = None
    headroom: Annotated[
        str | float, Option("5%|auto", "Warn if less than this share stays free; auto: as for `solve`.")
    ] = "0%"
    balance: Annotated[
        Numbers | File | None, Option("6,6,6,6|FILE", "Judge these cuts instead of the plan's.", _ELSEWHERE)
    ] = None
    model: Annotated[
        File | None, Option("MODEL.py[:ENTRY]", "Tell whether this still is the profiled model; needs torch.", _SINCE)
    ] = None
    against: Annotated[
        File | Plan | None,
        Option("PLAN|git:REV", "Tell what differs from this plan, or from this one as committed.", _SINCE),
    ] = None
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    strict: Annotated[bool, Option("", "Warnings make the answer no as well.")] = False
