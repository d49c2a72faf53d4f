"""Schedules from a building block: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362).

A building block states when each pass of one micro-batch starts. Each device has two stages, placed as a V. F, I and W
take one unit of time each. The next micro-batch repeats the block six units later, so that the devices are never idle.
The memory of a device depends only on how long a micro-batch stays on it.

    1. Repeat the block M times, with F and I only. Put each W into the first free unit after its I.
    2. Squeeze: move every action as early as its inputs and the memory allow. The repeated blocks leave the start and
      the end of the step half empty.
    3. After its last F, a device needs no additional memory. It then runs each I as soon as possible and a W when it
       would otherwise idle, so that gradients are sent sooner.

The authors' code squeezes and reorders by other rules. Its schedules have about the same idle time.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, count
from operator import itemgetter
from typing import Final, NamedTuple

from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS, Letter, MessageKind
from planner.core.schedule.program import needed_message
from planner.core.schedule.split_backward import VSchedule
from planner.core.values.placement import stages_on

_PERIOD = 6
"""Units of time per micro-batch on a device: F, I and W of two stages."""

_HOLDS: Final[Mapping[Letter, int]] = {"F": 1, "I": 0, "W": -1}
"""Change of the number of micro-batches that a device stores, by kind of action."""

_Slots = dict[int, Action]
"""Action of a device in each unit of time."""

_Message = tuple[MessageKind | None, int, int]
"""Result of an action: its message kind (None for W), the stage that makes it, and the micro-batch."""


class PassStartTimes(NamedTuple):
    """Start times of forward (F) and input-gradient (I) passes on one device, for the first micro-batch.

    Each of the device's two stages has one F and one I. The unit of time is the duration of one pass.
    """

    forward_down: int
    """Start time of F on the device's first stage (way down the V)."""
    forward_up: int
    """Start time of F on the device's second stage (way up the V)."""
    backward_up: int
    """Start time of I on the device's second stage."""
    backward_down: int
    """Start time of I on the device's first stage."""


class BuildingBlockSchedule(VSchedule):
    """Schedule that repeats one pattern of passes for each micro-batch. Each device has two stages, placed as a V."""

    @abstractmethod
    def pass_start_times(self, device: int, num_devices: int) -> PassStartTimes:
        """Return the start times of the first micro-batch's passes on a device."""

    @abstractmethod
    def max_stored_micro_batches(self, num_devices: int) -> int:
        """Return the largest number of micro-batches that a device stores between F and W, summed over its stages."""

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the device's actions: the repeated pattern, with each action as early as inputs and memory allow."""
        blocks = tuple(self.pass_start_times(k, num_devices) for k in range(num_devices))
        return _squeezed_orders(blocks, micro_batches, self.max_stored_micro_batches(num_devices))[device]


@lru_cache(maxsize=8)
def _squeezed_orders(
    blocks: tuple[PassStartTimes, ...], micro_batches: int, max_stored: int
) -> tuple[tuple[Action, ...], ...]:
    # O(K^2 M). The start times of one device must differ modulo six. `max_stored` is the largest number of forwards on
    # a device that may wait for their W, and at least the number in the pattern.
    stages = [stages_on(device, len(blocks), 2, "v") for device in range(len(blocks))]
    rows = [_repeated(block, down, up, micro_batches) for block, (down, up) in zip(blocks, stages, strict=True)]
    squeezed = _squeezed(rows, max_stored)
    return _simulate([[row[unit] for unit in sorted(row)] for row in squeezed])


def _repeated(block: PassStartTimes, down: int, up: int, micro_batches: int) -> _Slots:
    slots: _Slots = {}
    for i in range(micro_batches):
        slots[block.forward_down + _PERIOD * i] = Action(down, "F", i)
        slots[block.forward_up + _PERIOD * i] = Action(up, "F", i)
        slots[block.backward_up + _PERIOD * i] = Action(up, "I", i)
        slots[block.backward_down + _PERIOD * i] = Action(down, "I", i)
    last = -1
    for unit, action in sorted(slots.items(), key=itemgetter(0)):
        if action.kind == "I":
            last = next(n for n in count(max(last, unit) + 1) if n not in slots)
            slots[last] = Action(action.stage, "W", action.micro_batch)
    return slots


def _squeezed(rows: Sequence[_Slots], max_stored: int) -> list[_Slots]:
    num_stages = 2 * len(rows)
    squeezed = [dict(row) for row in rows]
    # Forwards of each device that wait for their W after each unit of time.
    held = [
        list(accumulate(_HOLDS[row[unit].kind] if unit in row else 0 for unit in range(max(row) + 1))) for row in rows
    ]
    over: dict[_Message | None, int] = {}
    last: dict[tuple[Letter, int], int] = {}
    for unit, device in sorted((unit, device) for device, row in enumerate(rows) for unit in row):
        action, row, holds = rows[device][unit], squeezed[device], held[device]
        # W actions of a device keep the order of its I actions, whatever their stage.
        queue = action.kind, device if action.kind == "W" else action.stage
        begin = max(last.get(queue, -1), over.get(_message_for(action, num_stages), -1)) + 1
        if action.kind == "F":
            # A forward that moves to an earlier unit needs memory from that unit on, so that no unit in between may be
            # full.
            begin = next((n + 1 for n in range(unit - 1, begin - 1, -1) if holds[n] >= max_stored), begin)
        place = next((n for n in range(begin, unit) if n not in row), unit)
        del row[unit]
        row[place] = action
        for n in range(place, unit):
            holds[n] += _HOLDS[action.kind]
        last[queue] = over[_message_of(action)] = place
    return squeezed


def _simulate(rows: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    # This always ends: the squeezed rows are a valid order, so the earliest remaining action can run.
    devices = [_OrderedDevice(row, 2 * len(rows)) for row in rows]
    over: set[_Message | None] = {None}
    while any(device.wanted or device.waiting for device in devices):
        unit = [device.next_action(over) for device in devices]
        over.update(_message_of(action) for action in unit if action is not None)
    return tuple(tuple(device.actions) for device in devices)


class _OrderedDevice:
    """Device that follows its action order until its last F. Later, it runs a W only if no other action can run."""

    def __init__(self, row: Sequence[Action], num_stages: int) -> None:
        last_forward = max(place for place, action in enumerate(row) if action.kind == "F")
        behind = row[last_forward:]
        self.wanted = deque((*row[:last_forward], *(action for action in behind if action.kind != "W")))
        self.waiting = deque(action for action in behind if action.kind == "W")
        self.actions: list[Action] = []
        self._num_stages = num_stages

    def next_action(self, over: Container[_Message | None]) -> Action | None:
        wanted, waiting = self.wanted, self.waiting
        if wanted and _message_for(wanted[0], self._num_stages) in over:
            self.actions.append(wanted.popleft())
        elif waiting and _message_for(waiting[0], self._num_stages) in over:
            self.actions.append(waiting.popleft())
        else:
            return None
        return self.actions[-1]


def _message_of(action: Action) -> _Message:
    return KINDS[action.kind].message_kind, action.stage, action.micro_batch


def _message_for(action: Action, num_stages: int) -> _Message | None:
    need = needed_message(action.kind, action.stage, num_stages)
    return None if need is None else (need.message_kind, need.stage, action.micro_batch)
