"""Event simulator: when each action of a schedule starts and ends on stages of given speed, over links of given cost.

It knows nothing of the closed forms in `planner.core.step_time`; tests hold the two against each other.
Every device and every direction of every link does one thing at a time, devices in the order of their action lists,
links in the order in which the sender gets done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.core.schedule import Action, execution_order

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
    recompute_us: float = 0.0
    """How much of `backward_us` is computing activations again."""
    last_recompute_us: float = 0.0
    """How much of `last_backward_us` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action (or the transfer that follows it) with its interval. `stage` is the sender for a transfer."""

    kind: Literal["F", "B", "send F", "send B"]
    stage: int
    """Place in the chain."""
    device: int
    """The device that runs the stage: `stage` modulo K."""
    micro_batch: int
    start_us: float
    end_us: float


def simulate(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> tuple[Event, ...]:
    """All events of one step, sorted by start time.

    Stage s runs on device s modulo K. What it computes goes to stage s+1 (forward) or s-1 (backward), over the link
    between their devices; where K = 1, nothing is sent. Chunks share the links: those of devices K-1 and 0 lead back
    to the front.

    Args:
        actions: Per device (K of them), its actions in order; stage s's F needs stage s-1's F, its B stage s+1's B.
        stages: Per stage (K times the chunks of a device), its times, in the order of the chain.

    Raises:
        ValueError: The action lists wait for each other in a circle, or the stages are not a multiple of the devices.
    """
    if not actions or len(stages) % len(actions):
        raise ValueError(f"{len(stages)} stages cannot lie on {len(actions)} devices, each with as many")
    run = _Run(actions, stages)
    for stage, action in execution_order(actions, len(stages)):
        run.lay_out(stage, action)
    return tuple(sorted(run.events, key=lambda e: (e.start_us, e.stage, e.micro_batch, e.kind)))


class _Run:
    """Clock of every device and link while the events are laid out."""

    def __init__(self, actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> None:
        self.stages = stages
        self.events: list[Event] = []
        self.device_free = [0.0] * len(actions)
        # By sender and receiver: with K = 2 the link carries forwards of one boundary beside backwards of the next.
        self.link_free: dict[tuple[int, int], float] = {}
        self.arrival: dict[tuple[int, str, int], float] = {}
        self.last_micro_batch = max((a.micro_batch for todo in actions for a in todo), default=-1)

    def lay_out(self, stage: int, action: Action) -> None:
        """Gives `action` its interval; what it needs has been laid out before."""
        step = 1 if action.kind == "F" else -1
        device = self._device(stage)
        ready = self.arrival.get((stage, action.kind, action.micro_batch), 0.0)
        start = max(ready, self.device_free[device]) + self._receive_us(stage, stage - step)
        end = start + self._compute_us(stage, action)
        self._record(action.kind, stage, action.micro_batch, start, end)
        self.device_free[device] = end
        if self._crosses(stage, stage + step):
            self._send(stage, stage + step, action, end)

    def _device(self, stage: int) -> int:
        return stage % len(self.device_free)

    def _crosses(self, stage: int, other: int) -> bool:
        # Neighbours on one device hand over in place; the device's own order then keeps one after the other.
        return 0 <= other < len(self.stages) and self._device(stage) != self._device(other)

    def _receive_us(self, stage: int, source: int) -> float:
        if not self._crosses(stage, source):
            return 0.0
        boundary = self.stages[min(stage, source)]
        return boundary.send_us if boundary.blocking else 0.0

    def _compute_us(self, stage: int, action: Action) -> float:
        times = self.stages[stage]
        if action.kind == "F":
            return times.forward_us
        return times.last_backward_us if action.micro_batch == self.last_micro_batch else times.backward_us

    def _send(self, stage: int, target: int, action: Action, ready: float) -> None:
        boundary = self.stages[min(stage, target)]
        arrived = ready
        if not boundary.blocking:
            link = (self._device(stage), self._device(target))
            start = max(ready, self.link_free.get(link, 0.0))
            arrived = start + boundary.send_us
            self.link_free[link] = arrived
            if boundary.send_us > 0:
                kind: Literal["send F", "send B"] = "send F" if action.kind == "F" else "send B"
                self._record(kind, stage, action.micro_batch, start, arrived)
        self.arrival[target, action.kind, action.micro_batch] = arrived

    def _record(
        self, kind: Literal["F", "B", "send F", "send B"], stage: int, micro_batch: int, start: float, end: float
    ) -> None:
        self.events.append(
            Event(
                kind=kind,
                stage=stage,
                device=self._device(stage),
                micro_batch=micro_batch,
                start_us=start,
                end_us=end,
            )
        )
