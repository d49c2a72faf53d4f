"""Check that action orders form a step that can run to its end.

    - Stages are numbered along the pipeline from 0. Each stage is on one device, and all devices have the same number
      of stages.
    - Every micro-batch has exactly these actions on every stage: F and B, or F, I and W.
    - No device waits for a later action of its own, and devices do not wait for each other in a circle.

Stages may be placed on devices in any way, and micro-batches may overtake each other.
"""

from collections.abc import Sequence

from planner.core.errors import UsageError
from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS
from planner.core.schedule.program import DeadlockError, execution_order, needed_message

_MOST_NAMED = 4
"""Number of devices that a deadlock message names."""


def check_orders(actions: Sequence[Sequence[Action]], num_micro_batches: int) -> None:
    """Check that each device's actions, in the given order, form a step that can run.

    Raises:
        UsageError: The action orders are invalid; the message names the device, the action and the problem.
    """
    devices = _devices(actions)
    distinct = _distinct_actions(actions, num_micro_batches)
    for stage, device in enumerate(devices):
        for micro_batch in range(num_micro_batches):
            _refuse_incomplete(stage, device, micro_batch, distinct)
    try:
        execution_order(actions)
    except DeadlockError as error:
        raise UsageError(
            f"deadlock: {_describe_deadlock(error, devices, distinct)}",
            hint="change the order on one of these devices: each action comes after the actions that it needs",
        ) from None


def _devices(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    devices: dict[int, int] = {}
    for device, row in enumerate(actions):
        if not row:
            raise UsageError(f"device {device} has no action", hint="give the device an action order, or leave it out")
        for action in row:
            if devices.setdefault(action.stage, device) != device:
                raise UsageError(
                    f"device {device}: stage {action.stage} of {action} is on device {devices[action.stage]}",
                    hint="a stage is on one device, which runs all of its actions",
                )
    if not devices:
        raise UsageError("there are no action orders", hint="give an action order for every device")
    missing = next((stage for stage in range(len(devices)) if stage not in devices), None)
    if missing is not None:
        raise UsageError(
            f"no device has stage {missing}, device {devices[max(devices)]} has stage {max(devices)}",
            hint="stages are numbered along the pipeline from 0",
        )
    per_device = [len({action.stage for action in row}) for row in actions]
    for device, num_stages in enumerate(per_device):
        if num_stages != per_device[0]:
            raise UsageError(
                f"device {device} has {num_stages} stages, device 0 has {per_device[0]}",
                hint="all devices have the same number of stages",
            )
    return tuple(devices[stage] for stage in range(len(devices)))


def _distinct_actions(actions: Sequence[Sequence[Action]], num_micro_batches: int) -> set[Action]:
    distinct: set[Action] = set()
    for device, row in enumerate(actions):
        for action in row:
            if not 0 <= action.micro_batch < num_micro_batches:
                raise UsageError(
                    f"device {device}: {action} needs micro-batch {action.micro_batch}, there are {num_micro_batches}",
                    hint=f"micro-batches are numbered from 0 to {num_micro_batches - 1}",
                )
            if action in distinct:
                raise UsageError(f"device {device}: {action} occurs twice", hint=f"remove one {action}")
            distinct.add(action)
    return distinct


def _refuse_incomplete(stage: int, device: int, micro_batch: int, distinct: set[Action]) -> None:
    every = (Action(stage, letter, micro_batch) for letter in KINDS)
    passes = [action for action in every if action in distinct]
    if "".join(action.kind for action in passes) not in ("FB", "FIW"):
        raise UsageError(
            f"device {device}: micro-batch {micro_batch} passes stage {stage} by "
            f"{', '.join(map(str, passes)) or 'no action'}",
            hint="every micro-batch passes every stage once, by F and B, or by F, I and W",
        )


def _describe_deadlock(error: DeadlockError, devices: Sequence[int], distinct: set[Action]) -> str:
    texts = []
    for device, action in list(error.waiting.items())[:_MOST_NAMED]:
        needed = _needed_action(action, len(devices), distinct)
        texts.append(f"device {device} cannot start {action} before {needed} (device {devices[needed.stage]})")
    more = len(error.waiting) - _MOST_NAMED
    return ", ".join(texts) + (f", and {more} more" if more > 0 else "")


def _needed_action(action: Action, num_stages: int, distinct: set[Action]) -> Action:
    need = needed_message(action.kind, action.stage, num_stages)
    assert need is not None  # An action that needs no message never waits.
    senders = (
        Action(need.stage, letter, action.micro_batch)
        for letter, kind in KINDS.items()
        if kind.message_kind == need.message_kind
    )
    return next(sender for sender in senders if sender in distinct)
