"""Programs: what devices do in order, transfers included, and what each thing waits for.

The one place that knows which stage a stage hears from and sends to. A forward of stage s waits for that of stage s-1,
a backward for that of stage s+1, and on the last stage for its own forward: `Kind.direction` and `Kind.follows` say so.

    1F1B, K = 2, M = 2
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS, Letter

__all__ = [
    "Instruction",
    "Need",
    "device_of",
    "execution_order",
    "message_from",
    "message_to",
    "needed_for",
    "programs",
    "stage_of",
]


class Need(NamedTuple):
    """One kind of work on one stage, of the micro-batch in question."""

    kind: Letter
    stage: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """What one device does next; `send` and `receive` only begin a transfer."""

    do: Literal["run", "send", "receive"]
    kind: Letter
    """What is run; of a `send`, what made that which is sent; of a `receive`, what needs that which is received."""
    micro_batch: int
    chunk: int
    """Of the device whose instruction it is."""


def stage_of(device: int, chunk: int, num_devices: int) -> int:
    """The stage, counted along the chain, that is `chunk` of `device`."""
    return chunk * num_devices + device


def device_of(stage: int, num_devices: int) -> int:
    """The device that runs `stage`."""
    return stage % num_devices


def message_from(kind: Letter, stage: int, num_stages: int) -> int | None:
    """The stage whose message a kind of work begins with; None at the end of the chain where its direction begins."""
    source = stage - KINDS[kind].direction
    return source if 0 <= source < num_stages else None


def message_to(kind: Letter, stage: int, num_stages: int) -> int | None:
    """The stage that waits for what a kind of work makes; None at the other end of the chain."""
    target = stage + KINDS[kind].direction
    return target if 0 <= target < num_stages else None


def needed_for(kind: Letter, stage: int, num_stages: int) -> Need | None:
    """What must be over before a kind of work can begin on a stage; None for the first forward."""
    source = message_from(kind, stage, num_stages)
    if source is not None:
        return Need(kind, source)
    follows = KINDS[kind].follows
    return None if follows is None else Need(follows, stage)


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
        ValueError: The lists wait for each other in a circle, or for what is in no list.
    """
    num_devices = len(actions)
    num_stages = num_devices * (1 + max(action.chunk for row in actions for action in row))
    rows: list[list[Instruction]] = [[] for _ in actions]
    for stage, action in _in_turns(actions, num_stages):
        device = device_of(stage, num_devices)
        rows[device].append(Instruction("run", action.kind, action.micro_batch, action.chunk))
        target = message_to(action.kind, stage, num_stages)
        if target is None or device_of(target, num_devices) == device:
            continue  # nobody waits for it, or the device keeps it for itself
        rows[device].append(Instruction("send", action.kind, action.micro_batch, action.chunk))
        receive = Instruction("receive", action.kind, action.micro_batch, target // num_devices)
        rows[device_of(target, num_devices)].append(receive)
    return tuple(map(tuple, rows))


def execution_order(actions: Sequence[Sequence[Action]], num_stages: int) -> tuple[tuple[int, Action], ...]:
    """All actions in an order in which each comes after everything it waits for.

    Args:
        actions: Per device (K of them), its actions in order.
        num_stages: K V, the stages of the chain.

    Returns:
        Pairs of stage and action.

    Raises:
        ValueError: The lists wait for each other in a circle, or for what is in no list.
    """
    return tuple(_in_turns(actions, num_stages))


def _in_turns(actions: Sequence[Sequence[Action]], num_stages: int) -> Iterator[tuple[int, Action]]:
    """Turn by turn, every device does the next action of its list if what that needs was over before the turn."""
    num_devices = len(actions)
    needs = {(kind, s): needed_for(kind, s, num_stages) for kind in KINDS for s in range(num_stages)}
    over: set[tuple[Letter, int, int]] = set()
    position = [0] * num_devices
    while any(at < len(row) for at, row in zip(position, actions, strict=True)):
        turn = []
        for device, (at, row) in enumerate(zip(position, actions, strict=True)):
            if at == len(row):
                continue
            action = row[at]
            stage = stage_of(device, action.chunk, num_devices)
            need = needs[action.kind, stage]
            if need is None or (need.kind, need.stage, action.micro_batch) in over:
                turn.append((stage, action))
                position[device] += 1
        if not turn:
            progress = enumerate(zip(actions, position, strict=True))
            waiting = {device: str(row[at]) for device, (row, at) in progress if at < len(row)}
            raise ValueError(f"deadlock: devices wait for what never comes, at {waiting}")
        over.update((action.kind, stage, action.micro_batch) for stage, action in turn)
        yield from turn
