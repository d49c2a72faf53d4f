"""Schedules that run backwards in halves, made of others: each I where the whole backward was, each W later."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest import mock

from planner.core.schedule import SCHEDULES, Action, Schedule

__all__ = ["InHalves", "in_halves"]


class InHalves(Schedule):
    """`whole` with every W so many actions behind its I, in the order of the I.

    The backward of every fourth micro-batch stays whole, behind all that was put off: sums are added up as in `whole`.
    """

    name = "1f1b"
    title = "in halves"
    torch_name = ""

    def __init__(self, whole: Schedule, later: int) -> None:
        self._whole, self._later = whole, later

    def round_size(self, num_devices: int) -> int:
        """As many micro-batches as `whole` runs together."""
        return self._whole.round_size(num_devices)

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """I in place of B, and W when as many actions have passed, or none are left."""
        actions: list[Action] = []
        waiting: list[tuple[int, Action]] = []
        """From which number of actions on, a W."""
        for action in self._whole.order(device, num_devices, micro_batches, chunks):
            is_whole = action.kind == "B" and action.micro_batch % 4 == 3
            while waiting and (is_whole or waiting[0][0] <= len(actions)):
                actions.append(waiting.pop(0)[1])
            if action.kind == "B" and not is_whole:
                actions.append(Action(action.stage, "I", action.micro_batch))
                waiting.append((len(actions) + self._later, Action(action.stage, "W", action.micro_batch)))
            else:
                actions.append(action)
        return (*actions, *(action for _, action in waiting))


@contextmanager
def in_halves(name: str, later: int | None) -> Iterator[None]:
    """Meanwhile the schedule of that name runs backwards in halves; without a number it stays as it is."""
    known = cast("dict[str, Schedule]", SCHEDULES)
    changed = {} if later is None else {name: InHalves(known[name], later)}
    with mock.patch.dict(known, changed):
        yield
