"""Check that action orders form a step that can run to its end.

    - Stages are numbered along the pipeline from 0. Each stage is on one device, and all devices have the same number
      of stages.
    - Every micro-batch, 0 to M-1, passes every stage once: F and B, or F, I and W.
    - No action comes before an action of the same device that it needs.
    - Devices do not wait for each other in a circle.

Stages may be placed on devices in any way, and micro-batches may overtake each other.
"""

from collections.abc import Iterator, Sequence

from planner.core.errors import UsageError
from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS, MessageKind
from planner.core.schedule.program import DeadlockError, execution_order, needed_message

_Position = tuple[int, int]
"""Device, and index in its action order."""

_MOST_NAMED = 4
"""Number of devices that a deadlock message names."""


def check_orders(actions: Sequence[Sequence[Action]], num_micro_batches: int) -> None:
    """Raise UsageError if the action orders do not form a valid step.

    Args:
        actions: Actions of each device, in order.
        num_micro_batches: Number of micro-batches.

    Raises:
        UsageError: The action orders are invalid; the message names the device, the action and the problem.
    """
    devices = _devices(actions)
    positions = _positions(actions, num_micro_batches)
    for stage, device in enumerate(devices):
        for micro_batch in range(num_micro_batches):
            _refuse_incomplete(stage, device, micro_batch, positions)
    _refuse_too_early(devices, positions)
    try:
        execution_order(actions)
    except DeadlockError as error:
        raise UsageError(
            f"deadlock: {_describe_deadlock(error, devices, positions)}",
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


def _positions(actions: Sequence[Sequence[Action]], num_micro_batches: int) -> dict[Action, _Position]:
    positions: dict[Action, _Position] = {}
    for device, row in enumerate(actions):
        for index, action in enumerate(row):
            if not 0 <= action.micro_batch < num_micro_batches:
                raise UsageError(
                    f"device {device}: {action} needs micro-batch {action.micro_batch}, there are {num_micro_batches}",
                    hint=f"micro-batches are numbered from 0 to {num_micro_batches - 1}",
                )
            if action in positions:
                raise UsageError(f"device {device}: {action} occurs twice", hint=f"remove one {action}")
            positions[action] = device, index
    return positions


def _refuse_incomplete(stage: int, device: int, micro_batch: int, positions: dict[Action, _Position]) -> None:
    have = "".join(letter for letter in KINDS if Action(stage, letter, micro_batch) in positions)
    if have in ("FB", "FIW"):
        return
    forward = str(Action(stage, "F", micro_batch))
    whole, inputs, weights = (str(Action(stage, letter, micro_batch)) for letter in ("B", "I", "W"))
    if "F" not in have:
        text = f"{forward} is missing"
    elif "B" in have:
        text = f"{whole} is the whole backward, {inputs if 'I' in have else weights} is part of the same backward"
    elif "I" in have:
        text = f"{inputs} is an input-gradient pass, its weight-gradient pass {weights} is missing"
    elif "W" in have:
        text = f"{weights} is a weight-gradient pass, its input-gradient pass {inputs} is missing"
    else:
        text = f"{forward} has no backward, {whole} is missing"
    raise UsageError(
        f"device {device}: {text}",
        hint="every micro-batch passes every stage once, by F and B, or by F, I and W",
    )


def _refuse_too_early(devices: Sequence[int], positions: dict[Action, _Position]) -> None:
    for action, (device, index) in positions.items():
        for needed in _needed_actions(action, len(devices), positions):
            if positions[needed][0] == device and positions[needed][1] > index:
                raise UsageError(
                    f"device {device}: {action} comes before {needed}, which it needs",
                    hint=f"put {needed} before {action}",
                )


def _needed_actions(action: Action, num_stages: int, positions: dict[Action, _Position]) -> Iterator[Action]:
    need = needed_message(action.kind, action.stage, num_stages)
    if need is not None:
        yield _sending_action(need.message_kind, need.stage, action.micro_batch, positions)
    if KINDS[action.kind].follows == "F":
        yield Action(action.stage, "F", action.micro_batch)


def _sending_action(
    message_kind: MessageKind, stage: int, micro_batch: int, positions: dict[Action, _Position]
) -> Action:
    makers = (Action(stage, letter, micro_batch) for letter, kind in KINDS.items() if kind.message_kind == message_kind)
    return next(action for action in makers if action in positions)


def _describe_deadlock(error: DeadlockError, devices: Sequence[int], positions: dict[Action, _Position]) -> str:
    texts = []
    for device, action in list(error.waiting.items())[:_MOST_NAMED]:
        awaited = next(_needed_actions(action, len(devices), positions))
        texts.append(f"device {device} cannot start {action} before {awaited} (device {devices[awaited.stage]})")
    more = len(error.waiting) - _MOST_NAMED
    return ", ".join(texts) + (f", and {more} more" if more > 0 else "")
