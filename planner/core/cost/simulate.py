"""Event simulator: when each action of a schedule starts and ends on stages of given speed, over links of given cost.

It knows nothing of the closed forms in `planner.core.cost.step_time`; tests hold the two against each other.
Every device and every direction of every link does one thing at a time, devices in the order of their action lists,
links in the order in which the sender gets done.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.core.schedule.actions import Action, execution_order

__all__ = ["Event", "StageTimes", "last_end_us", "simulate"]

EventKind = Literal["F", "B", "send F", "send B"]


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

    kind: EventKind
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
    events = [
        Event(kind=kind, stage=stage, device=stage % len(actions), micro_batch=micro_batch, start_us=start, end_us=end)
        for kind, stage, micro_batch, start, end in _laid_out(actions, stages)
    ]
    return tuple(sorted(events, key=lambda e: (e.start_us, e.stage, e.micro_batch, e.kind)))


def last_end_us(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> float:
    """When the last event of `simulate` ends, several times faster: nothing but the clocks is kept."""
    return max((end for *_, end in _laid_out(actions, stages)), default=0.0)


# Private functions


def _laid_out(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]
) -> Iterator[tuple[EventKind, int, int, float, float]]:
    """Kind, stage, micro-batch, start and end of every event; what an event needs comes before it.

    One loop with its clocks in local variables: a plan for 128 stages has 65,000 actions, and `check` waits for them.
    """
    num_devices, num_stages = len(actions), len(stages)
    if not num_devices or num_stages % num_devices:
        raise ValueError(f"{num_stages} stages cannot lie on {num_devices} devices, each with as many")
    last_micro_batch = max((action.micro_batch for todo in actions for action in todo), default=-1)
    device_free = [0.0] * num_devices
    # By sender and receiver: with K = 2 the link carries forwards of one boundary beside backwards of the next.
    link_free: dict[tuple[int, int], float] = {}
    forward_arrival: dict[tuple[int, int], float] = {}
    backward_arrival: dict[tuple[int, int], float] = {}
    for stage, action in execution_order(actions, num_stages):
        times, micro_batch = stages[stage], action.micro_batch
        if action.kind == "F":
            step, arrival, duration = 1, forward_arrival, times.forward_us
        else:
            step, arrival = -1, backward_arrival
            duration = times.last_backward_us if micro_batch == last_micro_batch else times.backward_us
        device = stage % num_devices
        start = max(arrival.get((stage, micro_batch), 0.0), device_free[device])
        # Neighbours on one device hand over in place; the device's own order then keeps one after the other.
        source, target = stage - step, stage + step
        if num_devices > 1 and 0 <= source < num_stages:
            boundary = stages[min(stage, source)]
            if boundary.blocking:
                start += boundary.send_us
        end = device_free[device] = start + duration
        yield action.kind, stage, micro_batch, start, end
        if num_devices > 1 and 0 <= target < num_stages:
            boundary = stages[min(stage, target)]
            if not boundary.blocking:
                link = device, target % num_devices
                sent = max(end, link_free.get(link, 0.0))
                end = link_free[link] = sent + boundary.send_us
                if boundary.send_us > 0:
                    yield "send F" if step == 1 else "send B", stage, micro_batch, sent, end
            arrival[target, micro_batch] = end
