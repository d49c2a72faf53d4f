"""Schedules from a building block: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362).

A building block says at which time one micro-batch is where, two stages per device placed as a V, with F, I and W of
one unit each. Six units later the next micro-batch does the same: that is all work a device has for one, so there is
room for exactly it. What a device holds follows from how long a micro-batch stays there, and nothing else.

    1. The block is repeated M times, F and I only; Ws go into the free units behind their Is.
    2. Squeeze: everything moves to the front as far as what it waits for and the memory allow. The repeated blocks
       leave the beginning and the end half empty.
    3. Behind its last F, when no memory is needed any more, a device goes on with Is as soon as it can, and does Ws
       when it would wait: gradients are on their way sooner.

The authors' code squeezes and reorders by other rules, and wastes about as much.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, count
from operator import itemgetter
from typing import Final, NamedTuple

from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.kinds import KINDS, Flow, Letter
from planner.core.schedule.program import needed_for
from planner.core.values.placement import stages_on

_PERIOD = 6
"""Units of work that a device has for one micro-batch: F, I and W of two stages."""

_HOLDS: Final[Mapping[Letter, int]] = {"F": 1, "I": 0, "W": -1}
"""What each kind adds to what a device holds: in this paper a micro-batch is held until its W."""

_Slots = dict[int, Action]
"""What a device does in each unit of time."""

_Message = tuple[Flow | None, int, int]
"""Direction, stage and micro-batch of what others wait for."""


class Block(NamedTuple):
    """When the first micro-batch is on a device, in units."""

    forward_down: int
    """F of the first of its stages, by which micro-batches come."""
    forward_up: int
    """F of the second, by which they leave."""
    backward_up: int
    """I of the second."""
    backward_down: int
    """I of the first."""


class FromBlock(Schedule):
    """A schedule that repeats a building block on a V of two stages per device."""

    torch_name = ""
    is_chunked = True
    exact_chunks = 2
    placement = "v"
    splits_backward = True

    @abstractmethod
    def block(self, device: int, num_devices: int) -> Block:
        """The part of the building block that is on a device."""

    @abstractmethod
    def most_held(self, num_devices: int) -> int:
        """How many forwards, of either of its stages, a device holds before their W at most."""

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """The device's part of the repeated block, squeezed."""
        blocks = tuple(self.block(k, num_devices) for k in range(num_devices))
        return _lists_of(blocks, micro_batches, self.most_held(num_devices))[device]


@lru_cache(maxsize=8)
def _lists_of(blocks: tuple[Block, ...], micro_batches: int, most_held: int) -> tuple[tuple[Action, ...], ...]:
    """Every device's actions.

    Args:
        blocks: Per device (K of them), its part of the building block; no two times may agree modulo six.
        micro_batches: M.
        most_held: How many forwards, of either stage, a device may hold before their W: no less than the blocks need.

    Complexity: O(K^2 M) steps.
    """
    stages = [stages_on(device, len(blocks), 2, "v") for device in range(len(blocks))]
    rows = [_repeated(block, down, up, micro_batches) for block, (down, up) in zip(blocks, stages, strict=True)]
    squeezed = _squeezed(rows, most_held)
    return _run([[row[unit] for unit in sorted(row)] for row in squeezed])


def _repeated(block: Block, down: int, up: int, micro_batches: int) -> _Slots:
    """The block M times, a period apart, with Ws in the first free units behind their Is."""
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


def _squeezed(rows: Sequence[_Slots], most_held: int) -> list[_Slots]:
    """All actions as early as they can be, gone through in the order of time; none overtakes one of its kind."""
    num_stages = 2 * len(rows)
    squeezed = [dict(row) for row in rows]
    held = [_held(row) for row in rows]
    over: dict[_Message | None, int] = {}
    last: dict[tuple[Letter, int], int] = {}
    for unit, device in sorted((unit, device) for device, row in enumerate(rows) for unit in row):
        action, row, holds = rows[device][unit], squeezed[device], held[device]
        # Ws of a device stay in the order of its Is, whatever their stage.
        queue = action.kind, device if action.kind == "W" else action.stage
        begin = max(last.get(queue, -1), over.get(_message_for(action, num_stages), -1)) + 1
        if action.kind == "F":
            # From where it goes on it is held: nowhere on the way may the memory be full.
            begin = next((n + 1 for n in range(unit - 1, begin - 1, -1) if holds[n] >= most_held), begin)
        place = next((n for n in range(begin, unit) if n not in row), unit)
        del row[unit]
        row[place] = action
        for n in range(place, unit):
            holds[n] += _HOLDS[action.kind]
        last[queue] = over[_message_of(action)] = place
    return squeezed


def _run(rows: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Unit by unit, what each device does next.

    It goes on to the end: the rows are in an order that once held, so what is earliest in it has what it waits for.
    """
    devices = [_Device(row, 2 * len(rows)) for row in rows]
    over: set[_Message | None] = {None}
    while any(device.wanted or device.waiting for device in devices):
        unit = [device.next_action(over) for device in devices]
        over.update(_message_of(action) for action in unit if action is not None)
    return tuple(tuple(device.actions) for device in devices)


class _Device:
    """A device that keeps to the order of its row until its last F, and from there on puts off Ws where it can."""

    def __init__(self, row: Sequence[Action], num_stages: int) -> None:
        last_forward = max(place for place, action in enumerate(row) if action.kind == "F")
        behind = row[last_forward:]
        self.wanted = deque((*row[:last_forward], *(action for action in behind if action.kind != "W")))
        self.waiting = deque(action for action in behind if action.kind == "W")
        self.actions: list[Action] = []
        self._num_stages = num_stages

    def next_action(self, over: Container[_Message | None]) -> Action | None:
        """What is next in its order; if that cannot be, the W that has waited longest; None if none waits."""
        wanted, waiting = self.wanted, self.waiting
        if wanted and _message_for(wanted[0], self._num_stages) in over:
            self.actions.append(wanted.popleft())
        elif waiting and _message_for(waiting[0], self._num_stages) in over:
            self.actions.append(waiting.popleft())
        else:
            return None
        return self.actions[-1]


def _message_of(action: Action) -> _Message:
    """What an action makes."""
    return KINDS[action.kind].flow, action.stage, action.micro_batch


def _message_for(action: Action, num_stages: int) -> _Message | None:
    """What an action waits for."""
    need = needed_for(action.kind, action.stage, num_stages)
    return None if need is None else (need.flow, need.stage, action.micro_batch)


def _held(row: _Slots) -> list[int]:
    """How many forwards a device holds before their W, after each unit."""
    return list(accumulate(_HOLDS[row[unit].kind] if unit in row else 0 for unit in range(max(row) + 1)))
