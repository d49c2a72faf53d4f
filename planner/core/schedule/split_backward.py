"""Order of actions for schedules with split backwards: I runs as early as possible, and W fills idle time."""

from collections.abc import Sequence

from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.kinds import Letter


def alternating_order(
    forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int, lag: int
) -> tuple[Action, ...]:
    """Return a device's actions: warm-up forwards, then F, I and W in turn, with each W some micro-batches after its I.

    Args:
        forwards: All F actions of the device, in order.
        backwards: All I actions of the device, in order. W actions have the same order.
        warm_up: Number of forwards before the first I.
        lag: Number of I actions that wait for their W while F, I and W alternate.

    Source: Qi et al. 2023 (arXiv:2401.10241), figures 2 and 3: ZB-H1 and ZB-H2 differ only in `warm_up` and `lag`.
    """
    weights = [Action(action.stage, "W", action.micro_batch) for action in backwards]
    actions = list(forwards[:warm_up])
    for place, backward in enumerate(backwards):
        actions += forwards[warm_up + place : warm_up + place + 1]
        actions.append(backward)
        if place >= lag:
            actions.append(weights[place - lag])
    return (*actions, *weights[max(0, len(backwards) - lag) :])


DOWN, UP = 0, 1
"""Chunks of a device in a V: its stage on the way down, and its stage on the way up."""


class VSchedule(Schedule):
    """Schedule with split backwards and two stages per device, placed as a V."""

    torch_name = ""
    is_chunked = True
    exact_chunks = 2
    placement = "v"
    splits_backward = True


class OrderBuilder:
    """Builder of the action order of a device with several stages (chunks).

    Each method adds the action of a chunk's next micro-batch.

    Args:
        stages: Stages of the device, by chunk.
        micro_batches: Number of micro-batches; actions of later micro-batches are not added.
    """

    def __init__(self, stages: Sequence[int], micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._micro_batches = micro_batches
        self._forwards = [0] * len(stages)
        self._backwards = [0] * len(stages)
        self._waiting: list[tuple[int, int]] = []

    def add_forward(self, chunk: int) -> None:
        """Add the forward of the chunk's next micro-batch."""
        self._add(chunk, "F", self._forwards[chunk])
        self._forwards[chunk] += 1

    def add_backward(self, chunk: int) -> None:
        """Add the backward of the chunk's next micro-batch."""
        self._add(chunk, "B", self._backwards[chunk])
        self._backwards[chunk] += 1

    def add_input_backward(self, chunk: int) -> None:
        """Add the input-gradient pass of the chunk's next micro-batch, and queue its weight-gradient pass."""
        self._waiting.append((chunk, self._backwards[chunk]))
        self._add(chunk, "I", self._backwards[chunk])
        self._backwards[chunk] += 1

    def add_weight_backward(self, chunk: int | None = None) -> None:
        """Add the oldest queued weight-gradient pass, of `chunk` or of any chunk; do nothing if none is queued."""
        place = next((i for i, (waits, _) in enumerate(self._waiting) if chunk in (None, waits)), None)
        if place is not None:
            waits, micro_batch = self._waiting.pop(place)
            self._add(waits, "W", micro_batch)

    def _add(self, chunk: int, kind: Letter, micro_batch: int) -> None:
        if micro_batch < self._micro_batches:
            self.actions.append(Action(self._stages[chunk], kind, micro_batch))
