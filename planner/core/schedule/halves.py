"""What schedules with backwards in halves share: I as soon as it can be, W when there is nothing better to do."""

from collections.abc import Sequence

from planner.core.schedule.base import Action
from planner.core.schedule.kinds import Letter


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int, lag: int) -> tuple[Action, ...]:
    """Forwards to warm up with, then a forward and an I in turn, and with each I the W of one that came before.

    Args:
        forwards: Every F of the device, in order.
        backwards: Every I of the device, in order; its Ws come in the same.
        warm_up: How many forwards come before the first I, but for the one that it is paired with.
        lag: How many Is wait for their W in the steady phase.

    Source: Qi et al. 2023 (arXiv:2401.10241), figures 2 and 3, which are this with the numbers of ZB-H1 and ZB-H2.
    """
    weights = [Action(action.stage, "W", action.micro_batch) for action in backwards]
    actions = list(forwards[:warm_up])
    for place, backward in enumerate(backwards):
        actions += forwards[warm_up + place : warm_up + place + 1]
        actions.append(backward)
        if place >= lag:
            actions.append(weights[place - lag])
    return (*actions, *weights[max(0, len(backwards) - lag) :])


class Row:
    """The list of a device with several stages as it grows: each kind of each chunk goes on with its next micro-batch.

    Args:
        stages: The stages of the device, by chunk.
        micro_batches: M: what comes after the last one is left out.
    """

    def __init__(self, stages: Sequence[int], micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._micro_batches = micro_batches
        self._forwards = [0] * len(stages)
        self._backwards = [0] * len(stages)
        self._waiting: list[tuple[int, int]] = []

    def forward(self, chunk: int) -> None:
        """F of the chunk's next micro-batch."""
        self._add(chunk, "F", self._forwards[chunk])
        self._forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        """B of the chunk's next micro-batch."""
        self._add(chunk, "B", self._backwards[chunk])
        self._backwards[chunk] += 1

    def input_backward(self, chunk: int) -> None:
        """I of the chunk's next micro-batch, whose W waits from now on."""
        self._waiting.append((chunk, self._backwards[chunk]))
        self._add(chunk, "I", self._backwards[chunk])
        self._backwards[chunk] += 1

    def weight_backward(self, chunk: int | None = None) -> None:
        """The W that has waited longest, of one chunk or of any; nothing if none waits."""
        place = next((i for i, (waits, _) in enumerate(self._waiting) if chunk in (None, waits)), None)
        if place is not None:
            waits, micro_batch = self._waiting.pop(place)
            self._add(waits, "W", micro_batch)

    def _add(self, chunk: int, kind: Letter, micro_batch: int) -> None:
        if micro_batch < self._micro_batches:
            self.actions.append(Action(self._stages[chunk], kind, micro_batch))
