"""Action orders in the interactive report. The action order of a device is a text with one character per action.

A character selects a row of the table `ScheduleMenu.entries`. The row has an action, and its effect on memory. The
report's scripts can therefore replay an action order without an implementation of its schedule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from planner.core.cost.peak_points import ALLOCATIONS, AllocationCountChanges, allocation_count_changes
from planner.core.errors import UsageError
from planner.core.schedule import KINDS, SCHEDULES, Action, Schedule, schedule_of
from planner.core.values.limits import MOST_CHUNKS
from planner.core.values.plan import Plan
from planner.show.explore.request import ExplorerRequest

MOST_ACTIONS: Final = 400_000
"""Largest number of actions in all orders together. Each action is one character of the report."""

LETTERS: Final = tuple(KINDS)

OrderEntry = tuple[int, AllocationCountChanges]
"""Row of `ScheduleMenu.entries`: a code for an action, and the action's changes to the counts of allocations.

The code is 4 * chunk + index of the action's kind in `LETTERS`, or -1 for the optimizer step.
"""

EncodedOrder = tuple[str] | tuple[str, list[int]]
"""Action order of a device as a text; with each action's micro-batch if a stage runs micro-batches out of order."""


def _character(number: int) -> str:
    # Printable ASCII characters except quotes, `<` and backslash, then characters from U+00A1 on.
    if number >= 90:
        return chr(161 + number - 90)
    code = 35 + number
    code += code >= 60
    return chr(code + (code >= 92))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrders:
    """Action orders of all devices for one schedule, number of stages and number of micro-batches."""

    devices: tuple[EncodedOrder, ...]
    allocations: frozenset[int]
    """Allocations that exist at some point in these orders, as indices into `ALLOCATIONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedSchedule:
    """Schedule that the interactive report offers, with its action orders."""

    schedule: Schedule
    orders: Mapping[int, Mapping[int, DeviceOrders]]
    """Action orders by number of chunks per device, then by number of micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMenu:
    """Schedules that the interactive report offers, with their action orders."""

    schedules: tuple[OfferedSchedule, ...]
    entries: tuple[OrderEntry, ...]
    """Table of actions. Each character of an encoded order selects a row."""
    is_complete: bool
    """True if all orders fit into the interactive report."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of stages per device that the interactive report offers, ascending."""
        return tuple(sorted({chunks for one in self.schedules for chunks in one.orders}))

    def without(self, chunks: int) -> "ScheduleMenu":
        """Return the menu without orders that have `chunks` stages per device."""
        left = [
            replace(one, orders={n: orders for n, orders in one.orders.items() if n != chunks})
            for one in self.schedules
        ]
        return replace(self, schedules=tuple(one for one in left if one.orders), is_complete=False)


def schedule_menu(request: ExplorerRequest) -> ScheduleMenu:
    """Return the schedules that can run on the plan's devices, with their action orders.

    The longest action orders are left out if all orders together have more than `MOST_ACTIONS` actions.
    """
    plan = request.plan
    chosen = schedule_of(plan.schedule, plan.order), plan.chunks, plan.micro_batches
    cases = sorted(_cases(request), key=lambda case: (case != chosen, case[1] * case[2]))
    orders: dict[str, dict[int, dict[int, DeviceOrders]]] = {}
    entries: dict[OrderEntry, int] = {}
    left, is_complete = MOST_ACTIONS, True
    for schedule, chunks, micro_batches in cases:
        least = 2 * plan.num_devices * chunks * micro_batches
        if left < least and (schedule, chunks, micro_batches) != chosen:
            is_complete = False
            break
        try:
            rows = schedule.actions(plan.num_devices, micro_batches, chunks)
        except UsageError:
            continue  # the schedule does not support this number of micro-batches
        left -= sum(map(len, rows))
        stages = (schedule.stages_on(device, plan.num_devices, chunks) for device in range(plan.num_devices))
        changes = allocation_count_changes(rows)
        orders.setdefault(schedule.name, {}).setdefault(chunks, {})[micro_batches] = DeviceOrders(
            devices=tuple(_order(*each, entries) for each in zip(rows, stages, changes, strict=True)),
            allocations=frozenset(
                n % len(ALLOCATIONS) for each in set().union(*changes) for n in _changed_counts(each)
            ),
        )
    listed = (
        OfferedSchedule(schedule=schedule, orders=orders[schedule.name])
        for schedule in _schedules(request)
        if schedule.name in orders
    )
    return ScheduleMenu(schedules=tuple(listed), entries=tuple(entries), is_complete=is_complete)


def _schedules(request: ExplorerRequest) -> Iterator[Schedule]:
    plan = request.plan
    for schedule in SCHEDULES.values():
        # Schedules with a split backward need two devices, and compiled programs do not split the backward.
        can_split = plan.num_devices > 1 and request.profile.device.how != "compiled"
        if not schedule.splits_backward or can_split or schedule.name == plan.schedule:
            yield schedule
    if plan.schedule not in SCHEDULES:
        yield schedule_of(plan.schedule, plan.order)


def _cases(request: ExplorerRequest) -> Iterator[tuple[Schedule, int, int]]:
    plan, num_layers = request.plan, len(request.profile.layers)
    for schedule in _schedules(request):
        if schedule.order_texts:
            yield schedule, plan.chunks, plan.micro_batches
            continue
        for chunks in _chunks(schedule, plan):
            can_run = chunks == 1 or plan.num_devices > 1
            if can_run and plan.num_devices * chunks <= num_layers:
                yield from ((schedule, chunks, m) for m in request.micro_batches)


def _chunks(schedule: Schedule, plan: Plan) -> Sequence[int]:
    if schedule.exact_chunks is not None:
        return (schedule.exact_chunks,)
    if not schedule.is_chunked:
        return (1,)
    return sorted({*range(2, MOST_CHUNKS + 1), *([plan.chunks] if schedule.name == plan.schedule else [])})


def _changed_counts(change: AllocationCountChanges) -> Iterator[int]:
    yield from change.before[::2]
    yield from change.running
    yield from change.after[::2]


def _order(
    row: Sequence[Action],
    stages: Sequence[int],
    changes: Sequence[AllocationCountChanges],
    entries: dict[OrderEntry, int],
) -> EncodedOrder:
    places = {(s, kind): len(LETTERS) * v + n for v, s in enumerate(stages) for n, kind in enumerate(LETTERS)}
    codes = [places[action.stage, action.kind] for action in row]
    numbers = (
        entries.setdefault(entry, len(entries)) for entry in zip([*codes, *[-1] * len(stages)], changes, strict=True)
    )
    text = "".join(map(_character, numbers))
    following = {code: count() for code in codes}
    if all(next(following[code]) == action.micro_batch for code, action in zip(codes, row, strict=True)):
        return (text,)
    return text, [action.micro_batch for action in row]
