"""Instruction lists of devices, including transfers, and the dependencies between actions.

`planner.core.schedule.kinds` lists the dependencies. Other modules get them from the functions of this module.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Final, Literal, NamedTuple

from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS, Letter, MessageKind

_FLOWS: Final = {letter: kind.message_kind for letter, kind in KINDS.items()}


class NeededMessage(NamedTuple):
    """Message that must exist before an action of the same micro-batch can start."""

    message_kind: MessageKind
    stage: int


class DeadlockError(ValueError):
    """Error about devices whose action orders wait for each other in a circle, or for a missing action.

    Args:
        waiting: Action at which each unfinished device waits.
    """

    def __init__(self, waiting: Mapping[int, Action]) -> None:
        where = {device: str(action) for device, action in waiting.items()}
        super().__init__(f"deadlock: devices wait for actions that never finish, at {where}")
        self.waiting = waiting


class Instruction(NamedTuple):
    """Instruction of a device: run an action, or start a transfer (`send`, `receive`)."""

    do: Literal["run", "send", "receive"]
    kind: Letter
    """Kind of the action that runs; for a transfer, its direction `F` or `B`."""
    micro_batch: int
    stage: int
    """Stage that runs the action, sends or receives."""


_instruction = lru_cache(maxsize=1 << 15)(Instruction)
"""Function that returns an instruction; much faster than the constructor if the instruction was made before."""


def sending_stage(kind: Letter, stage: int, num_stages: int) -> int | None:
    """Return the stage that sends the message for which an action waits.

    Args:
        kind: Kind of the action.
        stage: Stage that runs it.
        num_stages: Stages of the pipeline.

    Returns:
        `stage - 1` for F, `stage + 1` for B and I. None for W, for F of the first stage, and for B and I of the last
        stage.
    """
    source = stage - KINDS[kind].direction
    return source if source != stage and 0 <= source < num_stages else None


def receiving_stage(kind: Letter, stage: int, num_stages: int) -> int | None:
    """Return the stage that waits for an action's message.

    Args:
        kind: Kind of the action.
        stage: Stage that runs it.
        num_stages: Stages of the pipeline.

    Returns:
        `stage + 1` for F, `stage - 1` for B and I. None for W, for F of the last stage, and for B and I of the first
        stage.
    """
    target = stage + KINDS[kind].direction
    return target if target != stage and 0 <= target < num_stages else None


def needed_message(kind: Letter, stage: int, num_stages: int) -> NeededMessage | None:
    """Return the message that must exist before an action can start.

    Args:
        kind: Kind of the action.
        stage: Stage that runs it.
        num_stages: Stages of the pipeline.

    Returns:
        The message and the stage that sends it, which may be `stage` itself; None for F of the first stage.
    """
    source, message_kind, follows = (
        sending_stage(kind, stage, num_stages),
        KINDS[kind].message_kind,
        KINDS[kind].follows,
    )
    if source is not None and message_kind is not None:
        return NeededMessage(message_kind, source)
    return None if follows is None else NeededMessage(follows, stage)


def devices_of(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return the device of each stage.

    Raises:
        ValueError: A stage is in no action order, or in several.
    """
    devices = {action.stage: device for device, row in enumerate(actions) for action in row}
    num_pairs = len({(action.stage, device) for device, row in enumerate(actions) for action in row})
    if sorted(devices) != list(range(num_pairs)):
        raise ValueError(f"every stage must be in the action order of one device, got the stages {sorted(devices)}")
    return tuple(devices[stage] for stage in range(len(devices)))


def instruction_lists(actions: Sequence[Sequence[Action]]) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instruction lists of all devices: their actions and the transfers between them.

    `actions` has the actions of each device, in order. Two devices list the transfers between them in the same
    order, so the devices cannot block each other. If possible, a device starts to receive an activation one action
    before the action that needs it, so that the transfer overlaps with an action.

    Raises:
        DeadlockError: The action orders wait for each other in a circle, or for a missing action.
        ValueError: A stage is in several action orders, or in none.
    """
    devices = devices_of(actions)
    num_stages = len(devices)
    targets = {(kind, stage): receiving_stage(kind, stage, num_stages) for kind in KINDS for stage in range(num_stages)}
    rows: list[list[Instruction]] = [[] for _ in actions]
    for stage, kind, micro_batch in _in_turns(tuple(map(tuple, actions)), devices):
        device, message_kind, target = devices[stage], _FLOWS[kind], targets[kind, stage]
        rows[device].append(_instruction("run", kind, micro_batch, stage))
        if message_kind is None or target is None or devices[target] == device:
            continue  # no stage needs it, or the device keeps it
        rows[device].append(_instruction("send", message_kind, micro_batch, stage))
        rows[devices[target]].append(_instruction("receive", message_kind, micro_batch, target))
    return tuple(map(tuple, rows))


def execution_order(actions: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """Return all actions of all devices in an order in which each action comes after the actions that it depends on.

    Raises:
        DeadlockError: The action orders wait for each other in a circle, or for a missing action.
        ValueError: A stage is in several action orders, or in none.
    """
    return _in_turns(tuple(map(tuple, actions)), devices_of(actions))


@lru_cache(maxsize=8)
def _in_turns(actions: tuple[tuple[Action, ...], ...], devices: tuple[int, ...]) -> tuple[Action, ...]:
    # Callers that need an order's instructions often need its simulation, too.
    num_stages = len(devices)
    size = 1 + max((action.micro_batch for row in actions for action in row), default=0)
    # A message has a number: that of its kind and stage, plus its micro-batch.
    number = {(flow, stage): n * size for n, (flow, stage) in enumerate(product(("F", "B", None), range(num_stages)))}
    sent = {(kind, s): number[_FLOWS[kind], s] for kind in KINDS for s in range(num_stages)}
    needs = {each: needed_message(*each, num_stages) for each in sent}
    needed = {each: None if need is None else number[need] for each, need in needs.items()}
    over: set[int] = set()
    position = [0] * len(actions)
    left = sum(map(len, actions))
    every: list[Action] = []
    while left:
        turn, messages = [], []
        for device, row in enumerate(actions):
            at = position[device]
            if at == len(row):
                continue
            stage, kind, micro_batch = action = row[at]
            need = needed[kind, stage]
            if need is None or need + micro_batch in over:
                turn.append(action)
                messages.append(sent[kind, stage] + micro_batch)
                position[device] = at + 1
        if not turn:
            progress = enumerate(zip(actions, position, strict=True))
            raise DeadlockError({device: row[at] for device, (row, at) in progress if at < len(row)})
        over.update(messages)
        left -= len(turn)
        every += turn
    return tuple(every)
