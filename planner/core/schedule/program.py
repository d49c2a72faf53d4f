"""Programs: what devices do in order, transfers included, and what each thing waits for.

The one place that knows which stage a stage hears from and sends to. A forward of stage s waits for that of stage s-1,
a backward, or the half of it that makes the input's gradient, for that of stage s+1, and on the last stage for its own
forward; the other half for the first one: `Kind.direction` and `Kind.follows` say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS, Flow, Letter


class Need(NamedTuple):
    """What a stage must have made of the micro-batch in question."""

    flow: Flow
    stage: int


class DeadlockError(ValueError):
    """The lists of devices wait for each other in a circle, or for what is in no list.

    Args:
        waiting: Per device that is not done, the action at which it waits.
    """

    def __init__(self, waiting: Mapping[int, Action]) -> None:
        where = {device: str(action) for device, action in waiting.items()}
        super().__init__(f"deadlock: devices wait for what never comes, at {where}")
        self.waiting = waiting


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a device does next; `send` and `receive` only begin a transfer."""

    do: Literal["run", "send", "receive"]
    kind: Letter
    """What is run; of a transfer `F` or `B`, which way it goes."""
    micro_batch: int
    stage: int
    """Of the device whose instruction it is."""


def message_from(kind: Letter, stage: int, num_stages: int) -> int | None:
    """The stage whose message a kind of work begins with; None at the end of the chain where its direction begins."""
    source = stage - KINDS[kind].direction
    return source if source != stage and 0 <= source < num_stages else None


def message_to(kind: Letter, stage: int, num_stages: int) -> int | None:
    """The stage that waits for what a kind of work makes; None at the other end of the chain."""
    target = stage + KINDS[kind].direction
    return target if target != stage and 0 <= target < num_stages else None


def needed_for(kind: Letter, stage: int, num_stages: int) -> Need | None:
    """What must be over before a kind of work can begin on a stage; None for the first forward."""
    source, flow, follows = message_from(kind, stage, num_stages), KINDS[kind].flow, KINDS[kind].follows
    if source is not None and flow is not None:
        return Need(flow, source)
    return None if follows is None else Need(follows, stage)


def devices_of(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Per stage, the device in whose list it occurs.

    Raises:
        ValueError: A stage is in no list, or in several.
    """
    devices = {action.stage: device for device, row in enumerate(actions) for action in row}
    num_pairs = len({(action.stage, device) for device, row in enumerate(actions) for action in row})
    if sorted(devices) != list(range(num_pairs)):
        raise ValueError(f"every stage must be in the list of one device, got the stages {sorted(devices)}")
    return tuple(devices[stage] for stage in range(len(devices)))


def programs(actions: Sequence[Sequence[Action]]) -> tuple[tuple[Instruction, ...], ...]:
    """The actions of every device with the transfers between devices, as the executor runs them.

    Devices take turns, all at once, with one action each; within a turn they are gone through in their order. What an
    action makes is sent right behind it, and what receives it is put at the end of what its device has by then: for a
    forward ahead of the device's own action of that turn, with which the transfer overlaps. Every two devices so have
    their transfers in the same order, and each waits only for what stands in front of it: they cannot block each other.

    Args:
        actions: Per device (K of them), its actions in order.

    Returns:
        Per device, its instructions in order.

    Raises:
        DeadlockError: The lists wait for each other in a circle, or for what is in no list.
        ValueError: A stage is in several lists, or one between others in none.
    """
    devices = devices_of(actions)
    rows: list[list[Instruction]] = [[] for _ in actions]
    for action in _in_turns(actions, devices):
        device, flow = devices[action.stage], KINDS[action.kind].flow
        rows[device].append(Instruction("run", action.kind, action.micro_batch, action.stage))
        target = message_to(action.kind, action.stage, len(devices))
        if flow is None or target is None or devices[target] == device:
            continue  # nobody waits for it, or the device keeps it for itself
        rows[device].append(Instruction("send", flow, action.micro_batch, action.stage))
        rows[devices[target]].append(Instruction("receive", flow, action.micro_batch, target))
    return tuple(map(tuple, rows))


def execution_order(actions: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """All actions in an order in which each comes after everything it waits for.

    Args:
        actions: Per device (K of them), its actions in order.

    Raises:
        DeadlockError: The lists wait for each other in a circle, or for what is in no list.
        ValueError: A stage is in several lists, or one between others in none.
    """
    return tuple(_in_turns(actions, devices_of(actions)))


def _in_turns(actions: Sequence[Sequence[Action]], devices: Sequence[int]) -> Iterator[Action]:
    """Turn by turn, every device does the next action of its list if what that needs was over before the turn."""
    num_stages = len(devices)
    needs = {(kind, s): needed_for(kind, s, num_stages) for kind in KINDS for s in range(num_stages)}
    over: set[tuple[Flow | None, int, int]] = set()
    position = [0] * len(actions)
    while any(at < len(row) for at, row in zip(position, actions, strict=True)):
        turn = []
        for device, (at, row) in enumerate(zip(position, actions, strict=True)):
            if at == len(row):
                continue
            action = row[at]
            need = needs[action.kind, action.stage]
            if need is None or (need.flow, need.stage, action.micro_batch) in over:
                turn.append(action)
                position[device] += 1
        if not turn:
            progress = enumerate(zip(actions, position, strict=True))
            raise DeadlockError({device: row[at] for device, (row, at) in progress if at < len(row)})
        over.update((KINDS[action.kind].flow, action.stage, action.micro_batch) for action in turn)
        yield from turn
