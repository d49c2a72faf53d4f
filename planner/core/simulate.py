"""Event simulator: when each action of a schedule starts and ends on stages of given speed, over links of given cost.

It knows nothing of the closed forms in `planner.core.step_time`; tests hold the two against each other.
Every stage and every direction of every link does one thing at a time, in the order of the action lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.core.schedule import Action

__all__ = ["Event", "StageTimes", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What one stage needs for one micro-batch, in microseconds."""

    forward_us: float
    backward_us: float
    """With recomputation, where the micro-batch is recomputed."""
    last_backward_us: float
    """Of the last micro-batch, which `except-last` does not recompute."""
    send_us: float = 0.0
    """Crossing the boundary behind this stage, once, in either direction; 0 for the last stage."""
    blocking: bool = False
    """Whether receiving over that boundary keeps the receiver busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action (or the transfer that follows it) with its interval. `stage` is the sender for a transfer."""

    kind: Literal["F", "B", "send F", "send B"]
    stage: int
    micro_batch: int
    start_us: float
    end_us: float


def simulate(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> tuple[Event, ...]:
    """All events of one step, sorted by start time.

    Args:
        actions: Per stage, its actions in order; stage k's F needs stage k-1's F, its B stage k+1's B.
        stages: Per stage, its times; as many as `actions`.

    Raises:
        ValueError: The action lists wait for each other in a circle.
    """
    run = _Run(actions, stages)
    position = [0] * len(actions)
    while any(done < len(todo) for done, todo in zip(position, actions, strict=True)):
        before = list(position)
        for stage, todo in enumerate(actions):
            while position[stage] < len(todo) and run.try_action(stage, todo[position[stage]]):
                position[stage] += 1
        if position == before:
            progress = enumerate(zip(actions, position, strict=True))
            waiting = {k: str(todo[done]) for k, (todo, done) in progress if done < len(todo)}
            raise ValueError(f"deadlock: stages wait for what never comes, at {waiting}")
    return tuple(sorted(run.events, key=lambda e: (e.start_us, e.stage, e.micro_batch, e.kind)))


class _Run:
    """Clock of every stage and link while the events are laid out."""

    def __init__(self, actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> None:
        self.stages = stages
        self.events: list[Event] = []
        self.stage_free = [0.0] * len(stages)
        self.link_free: dict[tuple[int, str], float] = {}
        self.arrival: dict[tuple[int, str, int], float] = {}
        self.num_forwards = max((a.micro_batch for todo in actions for a in todo), default=-1) + 1

    def try_action(self, stage: int, action: Action) -> bool:
        """Lays out `action` if what it needs has been computed; says whether it did."""
        step = 1 if action.kind == "F" else -1
        source = stage - step
        ready = 0.0
        if 0 <= source < len(self.stages):
            arrived = self.arrival.get((stage, action.kind, action.micro_batch))
            if arrived is None:
                return False
            ready = arrived
        elif action.kind == "B" and (stage, "done", action.micro_batch) not in self.arrival:
            return False
        start = max(ready, self.stage_free[stage]) + self._receive_us(stage, source)
        end = start + self._compute_us(stage, action)
        self._record(action.kind, stage, action.micro_batch, start, end)
        self.stage_free[stage] = end
        if action.kind == "F":
            self.arrival[stage, "done", action.micro_batch] = end
        if 0 <= stage + step < len(self.stages):
            self._send(stage, stage + step, action, end)
        return True

    def _receive_us(self, stage: int, source: int) -> float:
        if not 0 <= source < len(self.stages):
            return 0.0
        boundary = self.stages[min(stage, source)]
        return boundary.send_us if boundary.blocking else 0.0

    def _compute_us(self, stage: int, action: Action) -> float:
        times = self.stages[stage]
        if action.kind == "F":
            return times.forward_us
        return times.last_backward_us if action.micro_batch == self.num_forwards - 1 else times.backward_us

    def _send(self, stage: int, target: int, action: Action, ready: float) -> None:
        boundary = self.stages[min(stage, target)]
        arrived = ready
        if not boundary.blocking:
            start = max(ready, self.link_free.get((stage, action.kind), 0.0))
            arrived = start + boundary.send_us
            self.link_free[stage, action.kind] = arrived
            if boundary.send_us > 0:
                kind: Literal["send F", "send B"] = "send F" if action.kind == "F" else "send B"
                self._record(kind, stage, action.micro_batch, start, arrived)
        self.arrival[target, action.kind, action.micro_batch] = arrived

    def _record(
        self, kind: Literal["F", "B", "send F", "send B"], stage: int, micro_batch: int, start: float, end: float
    ) -> None:
        self.events.append(Event(kind=kind, stage=stage, micro_batch=micro_batch, start_us=start, end_us=end))
