"""The time law: clocks carried through a schedule, for one partition or for many at once.

    start of an action  =  the latest of: its device is free; what it waits for has arrived
    end                 =  start + its duration
    arrival behind it   =  end, and over a link that is one after the other: when the link is free, + its transfer

Every device and every direction of every link does one thing at a time, devices in the order of their action lists,
links in the order in which the sender gets done. A link that blocks lies with the receiver: the transfer keeps it busy
ahead of its action. What happens in which order does not depend on the times: it is worked out once per schedule, and
the same walk then carries single numbers (`simulate`, which also tells events) or arrays of them (`makespans`).

It knows nothing of the closed form in `planner.core.cost.step_time`; tests hold the two against each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.core.cost.linear import Linear
from planner.core.schedule import (
    KINDS,
    Action,
    Flow,
    Letter,
    devices_of,
    execution_order,
    message_from,
    message_to,
)

FloatArray = NDArray[np.float64]
Clock = TypeVar("Clock", float, FloatArray, Linear)

_BLOCK = 1024
"""Partitions whose clocks are carried together: as many as the processor's cache holds."""


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
    input_backward_us: float = 0.0
    """I, of a backward in halves: with recomputation, where the micro-batch is recomputed."""
    last_input_backward_us: float = 0.0
    """I of the last micro-batch."""
    weight_backward_us: float = 0.0
    """W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action (or the transfer that follows it) with its interval. `stage` is the sender for a transfer."""

    kind: str
    """The letter of a kind; of a transfer `send F` or `send B`, by its direction."""
    stage: int
    """Place in the chain."""
    device: int
    """The device that runs the stage."""
    micro_batch: int
    start_us: float
    end_us: float


class Times(NamedTuple, Generic[Clock]):
    """The times of every stage: of one partition as numbers, of many as arrays, or not known yet."""

    durations: Mapping[str, Sequence[Clock]]
    """By the letter of a kind."""
    last_durations: Mapping[str, Sequence[Clock]]
    """Those of the last micro-batch."""
    sends: Sequence[Clock]
    blocking: Sequence[bool]


class Clocks(NamedTuple, Generic[Clock]):
    """When each device begins its first action or the blocking transfer ahead of it, and ends its last action."""

    begins: Sequence[Clock]
    ends: Sequence[Clock]
    stage_ends: Sequence[Clock]
    """When each stage ends its last one."""


def simulate(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> tuple[Event, ...]:
    """All events of one step, sorted by start time.

    What a stage computes goes to the next one in its direction, over the link between their devices; neighbours on one
    device hand over in place. Chunks share the links: in a loop those of devices K-1 and 0 lead back to the front.

    Args:
        actions: Per device (K of them), its actions in order.
        stages: Per stage (K times the chunks of a device), its times, in the order of the chain.

    Raises:
        ValueError: The action lists wait for each other in a circle, or the stages are not a multiple of the devices.
    """
    events: list[Event] = []

    def note(step: _Step, is_send: bool, start_us: float, end_us: float) -> None:  # noqa: FBT001 - called by one
        event = Event(
            kind=f"send {KINDS[step.kind].flow}" if is_send else step.kind,
            stage=step.stage,
            device=step.device,
            micro_batch=step.micro_batch,
            start_us=start_us,
            end_us=end_us,
        )
        events.append(event)

    _walk(actions, stages, note)
    return tuple(sorted(events, key=lambda e: (e.start_us, e.stage, e.micro_batch, e.kind)))


def last_end_us(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> float:
    """When the last event of `simulate` ends, several times faster: nothing but the clocks is kept."""
    return max(_walk(actions, stages).ends, default=0.0)


def period_us(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], own_us: Sequence[float]) -> float:
    """How long after a step the next one can begin, if no device waits for any but its neighbours.

    A device begins anew when it is done with what it computed and with `own_us`, its optimizer's step: while its
    neighbours still work on the step before, if they began later. Steps that follow each other at the longest of these
    times, over devices, keep all that is waited for as it is.

    Args:
        actions: Per device (K of them), its actions in order.
        stages: Per stage, its times, in the order of the chain.
        own_us: Per device, what it does between two steps.
    """
    begins, ends, _ = _walk(actions, stages)
    return max(end - begin + own for begin, end, own in zip(begins, ends, own_us, strict=True))


def summed_early_us(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], sums_us: Sequence[float]
) -> list[float]:
    """How much of summing gradients over replicas is done when a device's last action ends; per device.

    Args:
        actions: Per device, its actions in order.
        stages: Per stage, its times, in the order of the chain.
        sums_us: Per stage, what summing its gradients takes.
    """
    return _summed_early(actions, _walk(actions, stages), sums_us, max)


def makespans(
    actions: Sequence[Sequence[Action]],
    *,
    forward_us: FloatArray,
    backward_us: FloatArray,
    last_backward_us: FloatArray,
    send_us: FloatArray,
    blocking: ArrayLike = False,
    input_backward_us: FloatArray | None = None,
    last_input_backward_us: FloatArray | None = None,
    weight_backward_us: FloatArray | None = None,
    own_us: FloatArray | None = None,
    sums_us: FloatArray | None = None,
) -> FloatArray:
    """When the last action ends, for N partitions of a chain into the same number of stages; or their `period_us`.

    Arrays have shape (N, S), S = K V stages in the order of the chain, and mean what the fields of `StageTimes` mean.

    Args:
        actions: Per device (K of them), its actions in order.
        forward_us: Forward of a micro-batch.
        backward_us: Backward of a micro-batch.
        last_backward_us: Backward of the last micro-batch.
        send_us: Crossing the boundary behind each stage; the last column is not read.
        blocking: Whether receiving over that boundary keeps the receiver busy: shape (S,), or one for all.
        input_backward_us: I; needed where actions are of that kind, as the next two.
        last_input_backward_us: I of the last micro-batch.
        weight_backward_us: W.
        own_us: What each device does between two steps, shape (N, K): then periods are returned.
        sums_us: The part of it that begins when a stage ends its last action, see `summed_early_us`; shape (N, S).

    Returns:
        Shape (N,), microseconds: the latest end of `simulate`, or what `period_us` returns, by the same operations.

    Raises:
        ValueError: As `simulate`, or arrays whose shapes differ.

    Complexity: O(K V M) numpy operations per 1024 partitions.
    """
    num_partitions, num_stages = forward_us.shape
    every = {"F": forward_us, "B": backward_us, "I": input_backward_us, "W": weight_backward_us}
    last = {**every, "B": last_backward_us, "I": last_input_backward_us}
    there = [times for times in (*every.values(), *last.values(), send_us) if times is not None]
    if {times.shape for times in there} != {forward_us.shape}:
        raise ValueError(f"times of {num_stages} stages of {num_partitions} partitions need arrays of one shape")
    blocks = np.broadcast_to(np.asarray(blocking, dtype=np.bool_), (num_stages,)).tolist()
    steps = _known_steps(tuple(map(tuple, actions)), num_stages)
    ends = np.empty(num_partitions)
    for first in range(0, num_partitions, _BLOCK):
        block = slice(first, min(first + _BLOCK, num_partitions))

        def rows(times: FloatArray, block: slice = block) -> list[FloatArray]:
            # A stage to a row, so that the clocks of all partitions lie side by side.
            return list(np.ascontiguousarray(times[block].T, dtype=np.float64))

        durations = {kind: rows(times) for kind, times in every.items() if times is not None}
        last_durations = {kind: rows(times) for kind, times in last.items() if times is not None}
        times = Times(durations, last_durations, rows(send_us), blocks)
        clocks = _carry(steps, len(actions), times, begin=np.zeros(block.stop - block.start), later=np.maximum)
        if own_us is None:
            ends[block] = np.max(clocks.ends, axis=0)
        else:
            early = 0.0 if sums_us is None else np.array(_summed_early(actions, clocks, rows(sums_us), np.maximum))
            ends[block] = np.max(np.subtract(clocks.ends, clocks.begins) + (own_us[block].T - early), axis=0)
    return ends


def clocks(
    actions: Sequence[Sequence[Action]], times: Times[Clock], *, begin: Clock, later: Callable[[Clock, Clock], Clock]
) -> Clocks[Clock]:
    """When each device begins and ends, by clocks of any kind: unknown ones make a programme of the schedule.

    Args:
        actions: Per device, its actions in order.
        times: What they take.
        begin: The clocks when the step begins.
        later: The later of two clocks.

    Raises:
        ValueError: As `simulate`.
    """
    steps = _known_steps(tuple(map(tuple, actions)), len(times.sends))
    return _carry(steps, len(actions), times, begin=begin, later=later)


class _Step(NamedTuple):
    """One action, with where everything it reads and writes is found."""

    kind: Letter
    stage: int
    device: int
    micro_batch: int
    is_last: bool
    """Whether its micro-batch is the last one."""
    flow: Flow | None
    source: tuple[Flow, int, int] | None
    """The message that it begins with: its direction, sending stage, micro-batch."""
    received_over: int
    """The stage in front of the boundary over which that comes; -1 where it comes over none."""
    sent_over: int
    """The stage in front of the boundary that its output crosses; -1 where it crosses none."""
    link: tuple[int, int]
    """Sending and receiving device: in a loop with K = 2 one carries forwards of a boundary, backwards of the next."""


@lru_cache(maxsize=64)
def _known_steps(actions: tuple[tuple[Action, ...], ...], num_stages: int) -> tuple[_Step, ...]:
    return _steps_of(actions, num_stages)


def _steps_of(actions: Sequence[Sequence[Action]], num_stages: int) -> tuple[_Step, ...]:
    num_devices = len(actions)
    if not actions or num_stages % num_devices:
        raise ValueError(f"{num_stages} stages cannot lie on {num_devices} devices, each with as many")
    devices = devices_of(actions)
    if len(devices) != num_stages:
        raise ValueError(f"the lists are of {len(devices)} stages, the times of {num_stages}")
    last_micro_batch = max((action.micro_batch for row in actions for action in row), default=-1)

    def other_device(stage: int, neighbour: int | None) -> int | None:
        # Neighbours on one device hand over in place; the device's own order then keeps one after the other.
        return None if neighbour is None or devices[neighbour] == devices[stage] else neighbour

    every = [(kind, s) for kind in KINDS for s in range(num_stages)]
    sources = {(kind, s): other_device(s, message_from(kind, s, num_stages)) for kind, s in every}
    targets = {(kind, s): other_device(s, message_to(kind, s, num_stages)) for kind, s in every}
    steps = []
    for action in execution_order(actions):
        stage, flow = action.stage, KINDS[action.kind].flow
        source, target = sources[action.kind, stage], targets[action.kind, stage]
        step = _Step(
            kind=action.kind,
            stage=stage,
            device=devices[stage],
            micro_batch=action.micro_batch,
            is_last=action.micro_batch == last_micro_batch,
            flow=flow,
            source=None if source is None or flow is None else (flow, source, action.micro_batch),
            received_over=-1 if source is None else min(stage, source),
            sent_over=-1 if target is None else min(stage, target),
            link=(devices[stage], -1 if target is None else devices[target]),
        )
        steps.append(step)
    return tuple(steps)


def _walk(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], note: "_Note | None" = None
) -> "Clocks[float]":
    """One partition's clocks."""
    durations = {
        "F": [stage.forward_us for stage in stages],
        "B": [stage.backward_us for stage in stages],
        "I": [stage.input_backward_us for stage in stages],
        "W": [stage.weight_backward_us for stage in stages],
    }
    last = {
        **durations,
        "B": [stage.last_backward_us for stage in stages],
        "I": [stage.last_input_backward_us for stage in stages],
    }
    times = Times(durations, last, [stage.send_us for stage in stages], [stage.blocking for stage in stages])
    steps = _steps_of(actions, len(stages))
    return _carry(steps, len(actions), times, begin=0.0, later=max, note=note)


_Note = Callable[[_Step, bool, float, float], None]
"""Is told of a step whether it is the transfer behind it, when it starts, and when it ends."""


def _carry(
    steps: Sequence[_Step],
    num_devices: int,
    times: Times[Clock],
    *,
    begin: Clock,
    later: Callable[[Clock, Clock], Clock],
    note: Callable[[_Step, bool, Clock, Clock], None] | None = None,
) -> Clocks[Clock]:
    """When each device begins and ends.

    Args:
        steps: In an order in which each comes after what it waits for.
        num_devices: K.
        times: What they take.
        begin: The clocks when the step begins.
        later: The later of two clocks.
        note: Is told of every action, and of every transfer that takes time.
    """
    device_free = [begin] * num_devices
    stage_ends = [begin] * len(times.sends)
    begins: list[Clock | None] = [None] * num_devices
    link_free: dict[tuple[int, int], Clock] = {}
    arrived: dict[tuple[Flow, int, int], Clock] = {}
    # A transfer of no time starts when it may and holds nobody up, if all of them are such.
    takes_time = any(_takes_time(send) for send in times.sends[:-1])
    for step in steps:
        start = device_free[step.device]
        if step.source is not None:
            start = later(start, arrived.pop(step.source))
        if begins[step.device] is None:
            begins[step.device] = start
        if step.source is not None and times.blocking[step.received_over]:
            start = start + times.sends[step.received_over]
        durations = times.last_durations if step.is_last else times.durations
        end = device_free[step.device] = stage_ends[step.stage] = start + durations[step.kind][step.stage]
        if note is not None:
            note(step, False, start, end)
        if step.sent_over < 0 or step.flow is None:
            continue
        if takes_time and not times.blocking[step.sent_over]:
            sent = later(end, link_free.get(step.link, begin))
            end = link_free[step.link] = sent + times.sends[step.sent_over]
            if note is not None and _takes_time(times.sends[step.sent_over]):
                note(step, True, sent, end)
        arrived[step.flow, step.stage, step.micro_batch] = end
    return Clocks([begin if first is None else first for first in begins], device_free, stage_ends)


def _summed_early(
    actions: Sequence[Sequence[Action]],
    clocks: Clocks[Clock],
    sums: Sequence[Clock],
    later: Callable[[Clock, Clock], Clock],
) -> list[Clock]:
    """Per device what is done of its sums when its last stage ends: one after another, each from its stage's end on."""
    early = []
    for stages in map(_by_last, actions):
        before = clocks.stage_ends[stages[0]]
        left = nothing = total = before - before
        for stage in stages:
            end = clocks.stage_ends[stage]
            left = later(left - (end - before), nothing) + sums[stage]
            before, total = end, total + sums[stage]
        early.append(total - left)
    return early


def _by_last(row: Sequence[Action]) -> list[int]:
    """The stages of a device, in the order in which they end their last actions."""
    return [*dict.fromkeys(action.stage for action in reversed(row))][::-1]


def _takes_time(send: float | FloatArray | Linear) -> bool:
    return bool(send) if isinstance(send, Linear) else bool(np.any(send))
