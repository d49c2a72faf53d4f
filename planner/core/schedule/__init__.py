"""Schedules: which device does what in which order.

A schedule is a value (`SCHEDULES` has them by name), what it makes devices do is data (`programs`). Everything that has
to know either reads it from here: names and titles, what runs with how many micro-batches, colours, and bounds.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from planner.core.schedule.base import Action, Loads, Schedule
from planner.core.schedule.dualpipev import DualPipeV
from planner.core.schedule.gpipe import GPipe
from planner.core.schedule.interleaved import Interleaved
from planner.core.schedule.interleaved_zb import InterleavedZB
from planner.core.schedule.kinds import KINDS, Flow, Kind, Label, Letter
from planner.core.schedule.listed import Listed, lists_of, texts_of
from planner.core.schedule.one_forward_one_backward import OneForwardOneBackward
from planner.core.schedule.program import (
    DeadlockError,
    Instruction,
    Need,
    devices_of,
    execution_order,
    message_from,
    message_to,
    needed_for,
    programs,
)
from planner.core.schedule.table import actions_in, table_of
from planner.core.schedule.v_half import VHalf
from planner.core.schedule.v_min import VMin
from planner.core.schedule.validity import check_lists
from planner.core.schedule.zb_h1 import ZBH1
from planner.core.schedule.zb_h2 import ZBH2
from planner.core.schedule.zbv import ZBV
from planner.core.values.plan import ScheduleName

__all__ = [
    "GIVEN",
    "GPIPE",
    "INTERLEAVED",
    "KINDS",
    "ONE_FORWARD_ONE_BACKWARD",
    "SCHEDULES",
    "SCHEDULE_CHOICES",
    "SEARCHED",
    "SEARCHED_IN_V",
    "SPLITTING",
    "Action",
    "DeadlockError",
    "Flow",
    "Instruction",
    "Kind",
    "Label",
    "Letter",
    "Listed",
    "Loads",
    "Need",
    "Schedule",
    "actions_in",
    "check_lists",
    "devices_of",
    "execution_order",
    "lists_of",
    "message_from",
    "message_to",
    "needed_for",
    "programs",
    "schedule_of",
    "schedules_for",
    "table_of",
    "texts_of",
]

GPIPE: Final = GPipe()
ONE_FORWARD_ONE_BACKWARD: Final = OneForwardOneBackward()
INTERLEAVED: Final = Interleaved()
SEARCHED: Final = Listed()
SEARCHED_IN_V: Final = Listed(meant_for="v")

GIVEN: Final[ScheduleName] = "given"
"""What a plan says was asked where the lists came from a file."""

SPLITTING: Final[tuple[Schedule, ...]] = (ZBH1(), ZBH2(), InterleavedZB(), ZBV(), VHalf(), VMin(), DualPipeV())
"""The schedules whose backwards come in halves."""

SCHEDULES: Final[Mapping[ScheduleName, Schedule]] = {
    schedule.name: schedule for schedule in (GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, *SPLITTING)
}
"""All schedules by name, in the order in which the solver tries them."""

SCHEDULE_CHOICES: Final = (*SCHEDULES, SEARCHED.name, "auto")
"""What an option may say of the schedule."""


@lru_cache(maxsize=64)
def schedule_of(name: ScheduleName, order: tuple[str, ...] = ()) -> Schedule:
    """The schedule that a plan names, or has as lists.

    Args:
        name: Of the schedule.
        order: Per device its actions as text, where the schedule was made for the plan; without them a searched one
            has its name alone.

    Raises:
        UsageError: A word of the lists is no action.
    """
    if order:
        return Listed(lists_of(order))
    return SEARCHED if name in (SEARCHED.name, GIVEN) else SCHEDULES[name]


def schedules_for(policy: ScheduleName) -> tuple[Schedule, ...]:
    """The schedules that an option leaves to choose from: all of them, or the one that it names."""
    searched = SEARCHED, SEARCHED_IN_V
    if policy == "auto":
        return *SCHEDULES.values(), *searched
    return searched if policy == SEARCHED.name else (SCHEDULES[policy],)
