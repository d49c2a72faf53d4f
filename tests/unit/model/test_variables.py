"""A forward that only records leaves the user's variables unchanged."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.model.variables import undo_variable_changes

STATE: dict[str, Any] = {"mean": torch.zeros(2), "written": torch.zeros(2), "calls": 0, "started": False}
QUEUE: deque[Any] = deque([torch.zeros(2)])
SAMPLES = [0] * 20_000


def counter() -> Callable[[], int]:
    """Return a function that counts its calls in a closure."""
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return tick


TICK = counter()


class Memory(nn.Module):
    """Module-level object, as a loss with a memory of past batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(2))
        self.calls = 0


MEMORY = Memory()


@dataclass(slots=True)
class Progress:
    """Module-level object without a `__dict__`."""

    calls: int = 0
    last: Tensor | None = None


PROGRESS = Progress()


class Changes(nn.Module):
    """Changes everything that a forward can."""

    mean = torch.zeros(2)

    def __init__(self) -> None:
        super().__init__()
        self.initialized = False

    def forward(self, value: Tensor, past: list[Tensor] = []) -> Tensor:  # noqa: B006 - users do
        STATE["mean"] = value.mean(0)
        STATE["written"].add_(1)
        STATE["calls"] += 1
        STATE["started"] = True
        STATE["new"] = value
        QUEUE.append(value)
        past.append(value)
        Changes.mean = value.mean(0)
        self.initialized = True
        MEMORY.past.add_(1)
        MEMORY.calls += 1
        PROGRESS.calls += 1
        PROGRESS.last = value
        return value * TICK()


@pytest.mark.parametrize("value", [torch.ones(3, 2), torch.ones(3, 2, device="meta")])
def test_changes_of_a_recording_forward_are_undone(value: Tensor) -> None:
    """Module-level values, class attributes, defaults, closures and attributes."""
    model = Changes()
    with undo_variable_changes(model):
        model(value)
        assert STATE["started"]
        assert len(QUEUE) == 2
    assert not STATE["mean"].any()
    assert not STATE["written"].any()
    assert (STATE["calls"], STATE["started"], STATE.get("new")) == (0, False, None)
    assert (float(MEMORY.past.sum()), MEMORY.calls) == (0, 0)
    assert (PROGRESS.calls, PROGRESS.last) == (0, None)
    assert len(QUEUE) == 1
    assert not Changes.mean.any()
    assert Changes.forward.__defaults__ == ([],)
    assert not model.initialized
    with undo_variable_changes(model):
        assert TICK() == 1


def test_large_lists_are_neither_copied_nor_restored() -> None:
    """A copy of all samples would take their memory again in every forward."""
    with undo_variable_changes(Changes()):
        SAMPLES[0] = 1
    assert SAMPLES[0] == 1
