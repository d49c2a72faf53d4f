"""Schedules whose backwards run in halves, and profiles of devices on which nothing runs them."""

from planner.core.errors import UsageError
from planner.core.schedule import schedules_for
from planner.core.values.plan import ScheduleName
from planner.core.values.profile import Profile

__all__ = ["check_halves"]


def check_halves(profile: Profile, policy: ScheduleName) -> None:
    """Refuses schedules that run backwards in halves for a profile of compiled programs.

    Raises:
        UsageError: `policy` leaves no other schedule.
    """
    if profile.device.how == "compiled" and all(schedule.splits_backward for schedule in schedules_for(policy)):
        raise UsageError(
            f"`{policy}` runs backwards in halves, and the programs that train on `{profile.device.kind}` run them "
            "whole",
            hint="use `--schedule gpipe`",
        )
