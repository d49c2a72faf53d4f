"""Schedules: the order in which each device of a pipeline runs its forwards and backwards.

`SCHEDULES` maps names to schedules. `Schedule.actions` returns the action order of every device, and
`instruction_lists` adds the transfers. Names, titles, colors, bounds and supported numbers of micro-batches are defined
only in this package.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from planner.core.schedule.base import Action, ComputeTimeBounds, Schedule
from planner.core.schedule.dualpipev import DualPipeV
from planner.core.schedule.gpipe import GPipe
from planner.core.schedule.interleaved import Interleaved
from planner.core.schedule.interleaved_zb import InterleavedZB
from planner.core.schedule.kinds import KINDS, ActionKind, Label, Letter, MessageKind
from planner.core.schedule.listed import ListedSchedule, format_orders, parse_orders
from planner.core.schedule.one_forward_one_backward import OneForwardOneBackward
from planner.core.schedule.program import (
    DeadlockError,
    Instruction,
    NeededMessage,
    devices_of,
    execution_order,
    instruction_lists,
    needed_message,
    receiving_stage,
    sending_stage,
)
from planner.core.schedule.table import orders_as_csv, orders_from_csv
from planner.core.schedule.v_half import VHalf
from planner.core.schedule.v_min import VMin
from planner.core.schedule.validity import check_orders
from planner.core.schedule.zb_h import ZBH1, ZBH2
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
    "ActionKind",
    "ComputeTimeBounds",
    "DeadlockError",
    "Instruction",
    "Label",
    "Letter",
    "ListedSchedule",
    "MessageKind",
    "NeededMessage",
    "Schedule",
    "allowed_schedules",
    "check_orders",
    "devices_of",
    "execution_order",
    "format_orders",
    "instruction_lists",
    "needed_message",
    "orders_as_csv",
    "orders_from_csv",
    "parse_orders",
    "receiving_stage",
    "schedule_of",
    "sending_stage",
]

GPIPE: Final = GPipe()
ONE_FORWARD_ONE_BACKWARD: Final = OneForwardOneBackward()
INTERLEAVED: Final = Interleaved()
SEARCHED: Final = ListedSchedule()
SEARCHED_IN_V: Final = ListedSchedule(meant_for="v")

GIVEN: Final[ScheduleName] = "given"
"""Schedule name in a plan whose action orders were read from a file."""

SPLITTING: Final[tuple[Schedule, ...]] = (ZBH1(), ZBH2(), InterleavedZB(), ZBV(), VHalf(), VMin(), DualPipeV())
"""Schedules with split backward passes (I and W)."""

SCHEDULES: Final[Mapping[ScheduleName, Schedule]] = {
    schedule.name: schedule for schedule in (GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, *SPLITTING)
}
"""All schedules by name, in the order in which the solver tries them."""

SCHEDULE_CHOICES: Final = (*SCHEDULES, SEARCHED.name, "auto")
"""Accepted values of the schedule option."""


@lru_cache(maxsize=64)
def schedule_of(name: ScheduleName, order: tuple[str, ...] = ()) -> Schedule:
    """Return the schedule called `name`; if `order` is given, a schedule with these action orders, one per device.

    Raises:
        UsageError: A word of `order` is not an action.
    """
    if order:
        return ListedSchedule(parse_orders(order))
    return SEARCHED if name in (SEARCHED.name, GIVEN) else SCHEDULES[name]


def allowed_schedules(policy: ScheduleName) -> tuple[Schedule, ...]:
    """Return the schedules that a value of `--schedule` allows: all schedules for `auto`, else the named one."""
    searched = SEARCHED, SEARCHED_IN_V
    if policy == "auto":
        return *SCHEDULES.values(), *searched
    return searched if policy == SEARCHED.name else (SCHEDULES[policy],)
