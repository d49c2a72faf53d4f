"""Schedules whose backwards run in halves, and profiles of devices on which nothing runs them."""

from collections.abc import Sequence

from planner.core.errors import UsageError
from planner.core.schedule import Schedule
from planner.core.values.plan import ScheduleName
from planner.core.values.profile import Profile


def check_halves(profile: Profile, policy: ScheduleName, schedules: Sequence[Schedule]) -> None:
    """Refuses schedules that run backwards in halves for a profile of compiled programs.

    Raises:
        UsageError: `policy` leaves none but such `schedules`.
    """
    if profile.device.how == "compiled" and all(schedule.splits_backward for schedule in schedules):
        raise UsageError(
            f"`{policy}` runs backwards in halves, and the programs that train on `{profile.device.kind}` run them "
            "whole",
            hint="use `--schedule gpipe`",
        )
