"""Simulate the schedule of a training step: when each action and each transfer starts and ends.

    start of an action    = max(end of the device's previous action, arrival of the message that the action needs)
                            + transfer time, if the link is blocking
    end of an action      = start + duration
    arrival of a message  = end of the sender's action, if the link is blocking
                            else max(end of the sender's action, time when the link is free) + transfer time

Each device runs one action at a time, in its action order. Each direction of a link carries one message at a time, in
the order of the sender's actions. These orders are independent of times, and are computed once per schedule. Times may
be numbers (`simulate`), arrays over partitions (`makespans`), or linear expressions (`device_spans`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from planner.core.cost.arrays import FloatArray
from planner.core.schedule import (
    KINDS,
    Action,
    Letter,
    MessageKind,
    devices_of,
    execution_order,
    receiving_stage,
    sending_stage,
)


class _Time(Protocol):
    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...


Clock = TypeVar("Clock", bound=_Time)

_BLOCK = 1024
"""Number of partitions that are simulated at once: their times fit into the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one stage for one micro-batch, in microseconds."""

    forward_us: float
    backward_us: float
    """Backward pass, including recomputation if the stage recomputes."""
    last_backward_us: float
    """Backward pass of the last micro-batch, which `except-last` does not recompute."""
    send_us: float = 0.0
    """One transfer over the boundary to the next stage, in either direction; 0 for the last stage."""
    blocking: bool = False
    """True if a transfer between this stage and the next one keeps the receiving device busy."""
    recompute_us: float = 0.0
    """Part of `backward_us` that recomputes activations."""
    last_recompute_us: float = 0.0
    """Part of `last_backward_us` that recomputes activations."""
    input_backward_us: float = 0.0
    """Input-gradient pass (I) of a split backward, including recomputation."""
    last_input_backward_us: float = 0.0
    """Input-gradient pass (I) of the last micro-batch, which `except-last` does not recompute."""
    weight_backward_us: float = 0.0
    """Weight-gradient pass (W) of a split backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Start and end of one action, or of one transfer. For a transfer, `stage` is the sender."""

    kind: str
    """Letter of the action (F, B, I or W); `send F` or `send B` for a transfer, by its direction."""
    stage: int
    """Index of the stage in the chain."""
    device: int
    """Index of the device that runs the stage."""
    micro_batch: int
    start_us: float
    end_us: float


class StageDurations(NamedTuple, Generic[Clock]):
    """Durations of the actions and transfers of all stages, as numbers, arrays or linear expressions."""

    durations: Mapping[str, Sequence[Clock]]
    """Durations of actions, by letter (F, B, I, W) and then by stage."""
    last_durations: Mapping[str, Sequence[Clock]]
    """Durations of the last micro-batch's actions, by letter and then by stage."""
    sends: Sequence[Clock]
    blocking: Sequence[bool]


_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "F": ("forward_us", "forward_us"),
    "B": ("backward_us", "last_backward_us"),
    "I": ("input_backward_us", "last_input_backward_us"),
    "W": ("weight_backward_us", "weight_backward_us"),
}
"""Fields of `StageTimes` with durations, by action letter: for all micro-batches except the last, and for the last."""


class DeviceSpans(NamedTuple, Generic[Clock]):
    """Start and end of each device's step. A step starts with an action, or with a blocking transfer to the device."""

    begins: Sequence[Clock]
    ends: Sequence[Clock]
    stage_ends: Sequence[Clock]
    """End of the last action of each stage."""


def simulate(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> tuple[Event, ...]:
    """Simulate one step and return all its actions and transfers, sorted by start time.

    `actions` has the actions of each of K devices, in order. `stages` has the times of each stage, in pipeline order.
    Stages on one device need no transfer. In a loop placement, device K-1 also sends to device 0.

    Raises:
        ValueError: The devices wait for each other in a circle, or the number of stages is not a multiple of K.
    """
    events: list[Event] = []

    def note(step: _Step, is_send: bool, start_us: float, end_us: float) -> None:  # noqa: FBT001 - called by one
        event = Event(
            kind=f"send {KINDS[step.kind].message_kind}" if is_send else step.kind,
            stage=step.stage,
            device=step.device,
            micro_batch=step.micro_batch,
            start_us=start_us,
            end_us=end_us,
        )
        events.append(event)

    _compute_spans(actions, stages, note)
    return tuple(sorted(events, key=lambda e: (e.start_us, e.stage, e.micro_batch, e.kind)))


def last_end_us(actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> float:
    """Return the time at which the last action or transfer of a step ends, in microseconds."""
    return max(_compute_spans(actions, stages).ends, default=0.0)


def period_us(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], between_steps_us: Sequence[float]
) -> float:
    """Return the time from the start of a step to the start of the next step, in microseconds.

    Args:
        actions: Actions of each device, in order.
        stages: Times of each stage, in pipeline order.
        between_steps_us: Time of optimizer steps and all-reduces after the last action of each device.
    """
    begins, ends, _ = _compute_spans(actions, stages)
    return max(end - begin + own for begin, end, own in zip(begins, ends, between_steps_us, strict=True))


def early_allreduces_us(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], allreduce_us: Sequence[float]
) -> list[float]:
    """Return, for each device, how much of its all-reduces' time passes before its last action ends, in microseconds.

    Args:
        actions: Actions of each device, in order.
        stages: Times of each stage, in pipeline order.
        allreduce_us: Time of the all-reduce of each stage's gradients over the replicas.
    """
    return _early_us(actions, _compute_spans(actions, stages), allreduce_us, max)


def makespans(
    actions: Sequence[Sequence[Action]],
    times: Mapping[str, FloatArray],
    *,
    blocking: ArrayLike = False,
    between_steps_us: FloatArray | None = None,
    allreduce_us: FloatArray | None = None,
) -> FloatArray:
    """Return the step time of each of several partitions of a chain, in microseconds.

    With `between_steps_us`, the step time is the result of `period_us`; without it, the result of `last_end_us`.

    Args:
        actions: Actions of each device, in order.
        times: Arrays of shape (partitions, stages), by the names of the fields of `StageTimes`. Times of split
            backwards may be missing if the schedule does not split backwards.
        blocking: True if a transfer keeps the receiver busy: one value per stage, or one value for all.
        between_steps_us: Time of all-reduces and optimizer steps of each device, shape (partitions, devices), or None.
        allreduce_us: Time of each stage's all-reduce, shape (partitions, stages). If given, the result of
            `early_allreduces_us` is subtracted from `between_steps_us`.

    Raises:
        ValueError: As in `simulate`, or the arrays' shapes differ.

    Complexity: O(K V M) numpy operations per 1024 partitions, for K devices with V stages each and M micro-batches.
    """
    num_partitions, num_stages = shape = times["forward_us"].shape
    if any(each.shape != shape for each in times.values()):
        raise ValueError(f"arrays of times need one shape: ({num_partitions} partitions, {num_stages} stages)")
    blocks = np.broadcast_to(np.asarray(blocking, dtype=np.bool_), (num_stages,)).tolist()
    steps = _steps_of(tuple(map(tuple, actions)), num_stages)
    can_queue = _can_messages_queue(times)
    ends = np.empty(num_partitions)
    size = _BLOCK if num_partitions > 4 else 1  # numbers are faster than arrays of up to four numbers
    for first in range(0, num_partitions, size):
        block = slice(first, min(first + size, num_partitions))
        is_single = block.stop - first == 1

        def rows(each: FloatArray, block: slice = block, is_single: bool = is_single) -> list[Any]:  # noqa: FBT001
            # One row per stage, so that the times of all partitions are contiguous in memory.
            of_block = np.ascontiguousarray(each[block].T, dtype=np.float64)
            return of_block[:, 0].tolist() if is_single else list(of_block)

        def by_device(each: Sequence[Any]) -> FloatArray:
            return np.array(each).reshape(len(actions), -1)

        durations, last = (
            {letter: rows(times[names[n]]) for letter, names in _NAMES.items() if names[n] in times} for n in (0, 1)
        )
        of_block = StageDurations(durations, last, rows(times["send_us"]), blocks)
        begin: Any = 0.0 if is_single else np.zeros(block.stop - first)
        later_of: Any = max if is_single else np.maximum
        clocks = _compute_clocks(steps, len(actions), of_block, begin=begin, later_of=later_of, can_queue=can_queue)
        spans = by_device(clocks.ends)
        if between_steps_us is not None:
            early = 0.0 if allreduce_us is None else by_device(_early_us(actions, clocks, rows(allreduce_us), later_of))
            spans = spans - by_device(clocks.begins) + (between_steps_us[block].T - early)
        ends[block] = spans.max(axis=0)
    return ends


def _can_messages_queue(times: Mapping[str, FloatArray]) -> bool:
    # Return True if a message may wait for an earlier one: if a transfer may take longer than the shortest action that
    # sends a message. Otherwise, each transfer ends before its device sends again.
    longest_us = times["send_us"].max(initial=0)
    return any(bool((times[name] < longest_us).any()) for kind in "FBI" for name in _NAMES[kind] if name in times)


def device_spans(
    actions: Sequence[Sequence[Action]],
    times: StageDurations[Clock],
    *,
    begin: Clock,
    later_of: Callable[[Clock, Clock], Clock],
) -> DeviceSpans[Clock]:
    """Return when each device starts and ends its step. Times may have any type, such as linear expressions.

    Args:
        actions: Actions of each device, in order.
        times: Durations of actions and transfers.
        begin: Time at the start of the step.
        later_of: Function that returns the later of two times.

    Raises:
        ValueError: As in `simulate`.
    """
    steps = _steps_of(tuple(map(tuple, actions)), len(times.sends))
    return _compute_clocks(steps, len(actions), times, begin=begin, later_of=later_of)


class _Step(NamedTuple):
    """One simulated action, with its messages. `_compute_clocks` stores a message's arrival time at its slot."""

    kind: Letter
    stage: int
    device: int
    micro_batch: int
    is_first: bool
    """True for the first action of the device."""
    duration: int
    """Index of the action's duration in `_listed_durations`."""
    source: int
    """Slot of the message that the action waits for; -1 without a message from another device."""
    received_over: int
    """Boundary over which the action receives, as the index of the stage before the boundary; -1 without a transfer."""
    target: int
    """Slot of the message that the action sends; -1 without a message to another device."""
    sent_over: int
    """Boundary over which the action sends, as the index of the stage before the boundary; -1 without a transfer."""
    link: int
    """Index of the pair of sending and receiving device; -1 without a transfer."""


@lru_cache(maxsize=64)
def _steps_of(actions: tuple[tuple[Action, ...], ...], num_stages: int) -> tuple[_Step, ...]:
    num_devices = len(actions)
    if not actions or num_stages % num_devices:
        raise ValueError(f"{num_stages} stages cannot be divided evenly among {num_devices} devices")
    devices = devices_of(actions)
    if len(devices) != num_stages:
        raise ValueError(f"the action lists have {len(devices)} stages, the times {num_stages}")
    last_micro_batch = max((action.micro_batch for row in actions for action in row), default=-1)

    def other_device(stage: int, neighbour: int | None) -> int | None:
        # Neighboring stages on one device need no transfer. The device's action order keeps them one after the other.
        return None if neighbour is None or devices[neighbour] == devices[stage] else neighbour

    links: dict[tuple[int, int], int] = {}
    routes = {}
    for number, (kind, stage) in enumerate(product(KINDS, range(num_stages))):
        source = other_device(stage, sending_stage(kind, stage, num_stages))
        target = other_device(stage, receiving_stage(kind, stage, num_stages))
        link = -1 if target is None else links.setdefault((devices[stage], devices[target]), len(links))
        received_over, sent_over = (-1 if other is None else min(stage, other) for other in (source, target))
        routes[kind, stage] = number, source, received_over, sent_over, link, KINDS[kind].message_kind
    slots: dict[tuple[MessageKind | None, int, int], int] = {}
    free: list[int] = []
    begun: set[int] = set()
    steps = []
    for stage, kind, micro_batch in execution_order(actions):
        number, source, received_over, sent_over, link, message_kind = routes[kind, stage]
        device, received, sent = devices[stage], -1, -1
        if source is not None:
            free.append(received := slots.pop((message_kind, source, micro_batch)))
        if sent_over >= 0:
            sent = slots[message_kind, stage, micro_batch] = free.pop() if free else len(slots)
        duration = number + (micro_batch == last_micro_batch) * len(KINDS) * num_stages
        is_first = device not in begun
        begun.add(device)
        steps.append(
            _Step(kind, stage, device, micro_batch, is_first, duration, received, received_over, sent, sent_over, link)
        )
    return tuple(steps)


def _compute_spans(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], note: "_Note | None" = None
) -> "DeviceSpans[float]":
    durations, last = (
        {letter: [getattr(stage, names[n]) for stage in stages] for letter, names in _NAMES.items()} for n in (0, 1)
    )
    times = StageDurations(durations, last, [stage.send_us for stage in stages], [stage.blocking for stage in stages])
    steps = _steps_of(tuple(map(tuple, actions)), len(stages))
    return _compute_clocks(steps, len(actions), times, begin=0.0, later_of=max, note=note)


_Note = Callable[[_Step, bool, float, float], None]
"""Callback for an action (False) or for the transfer after it (True); the numbers are start and end in microseconds."""


def _compute_clocks(
    steps: Sequence[_Step],
    num_devices: int,
    times: StageDurations[Clock],
    *,
    begin: Clock,
    later_of: Callable[[Clock, Clock], Clock],
    can_queue: bool = True,
    note: Callable[[_Step, bool, Clock, Clock], None] | None = None,
) -> DeviceSpans[Clock]:
    device_free, begins = [begin] * num_devices, [begin] * num_devices
    stage_ends = [begin] * len(times.sends)
    durations, sends, blocking = _listed_durations(times), times.sends, times.blocking
    arrived: list[Clock] = [begin] * len(steps)
    link_free = [begin] * len(steps)
    # If no transfer takes time, transfers never wait for each other.
    takes_time = any(_takes_time(send) for send in sends[:-1])
    for step in steps:
        _, stage, device, _, is_first, duration, source, received_over, target, sent_over, link = step
        start = device_free[device]
        if source >= 0:
            start = later_of(start, arrived[source])
        if is_first:
            begins[device] = start
        if source >= 0 and blocking[received_over]:
            start = start + sends[received_over]
        end = device_free[device] = stage_ends[stage] = start + durations[duration]
        if note is not None:
            note(step, False, start, end)
        if target < 0:
            continue
        if takes_time and not blocking[sent_over]:
            sent = later_of(end, link_free[link]) if can_queue else end
            end = link_free[link] = sent + sends[sent_over]
            if note is not None and _takes_time(sends[sent_over]):
                note(step, True, sent, end)
        arrived[target] = end
    return DeviceSpans(begins, device_free, stage_ends)


def _listed_durations(times: StageDurations[Clock]) -> list[Clock]:
    # All durations by kind and stage, then those of the last micro-batch. A schedule needs no times of kinds that it
    # does not run.
    unused = [times.sends[0]] * len(times.sends)
    return [
        duration
        for by_kind in (times.durations, times.last_durations)
        for kind in KINDS
        for duration in by_kind.get(kind, unused)
    ]


def _early_us(
    actions: Sequence[Sequence[Action]],
    clocks: DeviceSpans[Clock],
    allreduces: Sequence[Clock],
    later_of: Callable[[Clock, Clock], Clock],
) -> list[Clock]:
    # An all-reduce starts when its stage has ended and the device's previous all-reduce is over.
    early = []
    for stages in map(_stages_by_end, actions):
        before = clocks.stage_ends[stages[0]]
        left = nothing = total = before - before
        for stage in stages:
            end = clocks.stage_ends[stage]
            left = later_of(left - (end - before), nothing) + allreduces[stage]
            before, total = end, total + allreduces[stage]
        early.append(total - left)
    return early


def _stages_by_end(row: Sequence[Action]) -> list[int]:
    return [*dict.fromkeys(action.stage for action in reversed(row))][::-1]


def _takes_time(send: Any) -> bool:
    return bool(np.any(send))
