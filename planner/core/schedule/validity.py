"""Whether lists of actions, wherever they come from, are a step of a pipeline that runs to its end.

    - Stages are numbered along the chain from 0 on, each is on one device, and all devices have as many.
    - Every micro-batch, 0 to M-1, passes every stage once: F, and B or I and W.
    - No action comes before one of its own device that it needs.
    - Devices do not wait for each other in a circle.

Nothing else is asked: stages may lie on devices in any manner, and micro-batches may overtake each other.
"""

from collections.abc import Iterator, Sequence

from planner.core.errors import UsageError
from planner.core.schedule.base import Action
from planner.core.schedule.kinds import KINDS, Flow
from planner.core.schedule.program import DeadlockError, execution_order, needed_for

_Place = tuple[int, int]
"""A device, and a place in its list."""

_MOST_NAMED = 4
"""Devices that the message of a deadlock names."""


def check_lists(actions: Sequence[Sequence[Action]], num_micro_batches: int) -> None:
    """Raises where the lists are no step.

    Args:
        actions: Per device (K of them), its actions in order.
        num_micro_batches: M.

    Raises:
        UsageError: They are none: it names the device and the action, and says what is wrong.
    """
    devices = _devices(actions)
    places = _places(actions, num_micro_batches)
    for stage, device in enumerate(devices):
        for micro_batch in range(num_micro_batches):
            _refuse_incomplete(stage, device, micro_batch, places)
    _refuse_too_early(devices, places)
    try:
        execution_order(actions)
    except DeadlockError as error:
        raise UsageError(
            f"the devices wait for each other: {_circle(error, devices, places)}",
            hint="change the order on one of them: each action comes after what it needs",
        ) from None


def _devices(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Per stage, its device."""
    devices: dict[int, int] = {}
    for device, row in enumerate(actions):
        if not row:
            raise UsageError(f"device {device} has nothing to do", hint="give every device a list, or leave it out")
        for action in row:
            if devices.setdefault(action.stage, device) != device:
                raise UsageError(
                    f"device {device}: {action} is of stage {action.stage}, which is on device {devices[action.stage]}",
                    hint="a stage lies on one device, which does everything for it",
                )
    if not devices:
        raise UsageError("there are no lists of actions", hint="give a list for every device")
    missing = next((stage for stage in range(len(devices)) if stage not in devices), None)
    if missing is not None:
        raise UsageError(
            f"no device has stage {missing}, device {devices[max(devices)]} has stage {max(devices)}",
            hint="stages are numbered along the chain from 0 on",
        )
    per_device = [len({action.stage for action in row}) for row in actions]
    for device, num_stages in enumerate(per_device):
        if num_stages != per_device[0]:
            raise UsageError(
                f"device {device} has {num_stages} stages, device 0 has {per_device[0]}",
                hint="all devices have the same number of stages",
            )
    return tuple(devices[stage] for stage in range(len(devices)))


def _places(actions: Sequence[Sequence[Action]], num_micro_batches: int) -> dict[Action, _Place]:
    """Where every action is; each once, and of a micro-batch that there is."""
    places: dict[Action, _Place] = {}
    for device, row in enumerate(actions):
        for place, action in enumerate(row):
            if not 0 <= action.micro_batch < num_micro_batches:
                raise UsageError(
                    f"device {device}: {action} is of micro-batch {action.micro_batch}, there are {num_micro_batches}",
                    hint=f"micro-batches are numbered from 0 to {num_micro_batches - 1}",
                )
            if action in places:
                raise UsageError(f"device {device}: {action} comes twice", hint=f"take out one {action}")
            places[action] = device, place
    return places


def _refuse_incomplete(stage: int, device: int, micro_batch: int, places: dict[Action, _Place]) -> None:
    """Raises unless a micro-batch passes a stage with F and B, or with F, I and W."""
    have = "".join(letter for letter in KINDS if Action(stage, letter, micro_batch) in places)
    if have in ("FB", "FIW"):
        return
    forward = str(Action(stage, "F", micro_batch))
    whole, half, weights = (str(Action(stage, letter, micro_batch)) for letter in ("B", "I", "W"))
    if "F" not in have:
        text = f"{forward} is missing"
    elif "B" in have:
        text = f"{whole} is the whole backward, {half if 'I' in have else weights} a half of the same"
    elif "I" in have:
        text = f"{half} is half of a backward, {weights} is missing"
    elif "W" in have:
        text = f"{weights} is half of a backward, {half} is missing"
    else:
        text = f"{forward} has no backward, {whole} is missing"
    raise UsageError(
        f"device {device}: {text}",
        hint="every micro-batch passes every stage once, by F and B, or by F, I and W",
    )


def _refuse_too_early(devices: Sequence[int], places: dict[Action, _Place]) -> None:
    """Raises where an action stands in front of one of the same device that it needs."""
    for action, (device, place) in places.items():
        for needed in _needs(action, len(devices), places):
            if places[needed][0] == device and places[needed][1] > place:
                raise UsageError(
                    f"device {device}: {action} comes before {needed}, which it needs",
                    hint=f"put {needed} in front of {action}",
                )


def _needs(action: Action, num_stages: int, places: dict[Action, _Place]) -> Iterator[Action]:
    """What must be over before an action: what it waits for, then its own forward, which follows from the rest."""
    need = needed_for(action.kind, action.stage, num_stages)
    if need is not None:
        yield _maker(need.flow, need.stage, action.micro_batch, places)
    if KINDS[action.kind].follows == "F":
        yield Action(action.stage, "F", action.micro_batch)


def _maker(flow: Flow, stage: int, micro_batch: int, places: dict[Action, _Place]) -> Action:
    """The action that makes what flows: a gradient comes of a B or of an I."""
    makers = (Action(stage, letter, micro_batch) for letter, kind in KINDS.items() if kind.flow == flow)
    return next(action for action in makers if action in places)


def _circle(error: DeadlockError, devices: Sequence[int], places: dict[Action, _Place]) -> str:
    """Who waits where for what."""
    texts = []
    for device, action in list(error.waiting.items())[:_MOST_NAMED]:
        awaited = next(_needs(action, len(devices), places))
        texts.append(f"device {device} at {action} for {awaited} on device {devices[awaited.stage]}")
    more = len(error.waiting) - _MOST_NAMED
    return ", ".join(texts) + (f", and {more} more" if more > 0 else "")
