"""The simulator's makespan for many partitions at once: same action lists, other times.

What happens in which order does not depend on the times, so it is worked out once per action lists; numpy then
carries the clocks of all partitions through it. Events are not kept; `planner.core.cost.simulate` has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.core.schedule.actions import Action, execution_order

__all__ = ["makespans"]

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_BLOCK = 1024
"""Partitions whose clocks are carried together: as many as the processor's cache holds."""


def makespans(
    actions: Sequence[Sequence[Action]],
    *,
    forward_us: FloatArray,
    backward_us: FloatArray,
    last_backward_us: FloatArray,
    send_us: FloatArray,
    blocking: ArrayLike = False,
) -> FloatArray:
    """When the last action ends, for N partitions into the same number of stages.

    Arrays have shape (N, S), S = K V stages in the order of the chain, and mean what the fields of
    `planner.core.cost.simulate.StageTimes` mean.

    Args:
        actions: Per device (K of them), its actions in order.
        forward_us: Forward of a micro-batch.
        backward_us: Backward of a micro-batch.
        last_backward_us: Backward of the last micro-batch.
        send_us: Crossing the boundary behind each stage; the last column is not read.
        blocking: Whether receiving over that boundary keeps the receiver busy: shape (S,), or one for all.

    Returns:
        Shape (N,), microseconds: the latest end of `planner.core.cost.simulate.simulate`, by the same operations.

    Raises:
        ValueError: As `simulate`, or arrays whose shapes differ.

    Complexity: O(K V M) numpy operations per 1024 partitions.
    """
    num_partitions, num_stages = forward_us.shape
    if {backward_us.shape, last_backward_us.shape, send_us.shape} != {forward_us.shape}:
        raise ValueError(f"times of {num_stages} stages of {num_partitions} partitions need arrays of one shape")
    blocks = np.broadcast_to(np.asarray(blocking, dtype=np.bool_), (num_stages,))
    steps = _steps_of(tuple(map(tuple, actions)), num_stages)
    # A stage to a row, so that the clocks of all partitions lie side by side.
    durations = np.concatenate((forward_us.T, backward_us.T, last_backward_us.T)).astype(np.float64, copy=False)
    ends = np.empty(num_partitions)
    for block in _blocks(num_partitions):
        sends = np.ascontiguousarray(send_us[block].T)
        ends[block] = _carry(steps, len(actions), np.ascontiguousarray(durations[:, block]), sends, blocks)
    return ends


@dataclass(frozen=True, slots=True)
class _Step:
    """One action, with where everything it reads and writes is found."""

    device: int
    duration: int
    """Row of the durations."""
    source: int | None
    """The step whose output it receives over a link; None where it receives nothing."""
    received_over: int
    """Boundary behind which stage the source lies or this step; -1 with no source."""
    sent_over: int
    """Boundary that its output crosses; -1 where nothing waits for it."""
    link: tuple[int, int]
    """Sending and receiving device."""


@lru_cache(maxsize=64)
def _steps_of(actions: tuple[tuple[Action, ...], ...], num_stages: int) -> tuple[_Step, ...]:
    num_devices = len(actions)
    if not actions or num_stages % num_devices:
        raise ValueError(f"{num_stages} stages cannot lie on {num_devices} devices, each with as many")
    last_micro_batch = max((action.micro_batch for row in actions for action in row), default=-1)
    places: dict[tuple[str, int, int], int] = {}
    steps = []
    for place, (stage, action) in enumerate(execution_order(actions, num_stages)):
        ahead = 1 if action.kind == "F" else -1
        receives = num_devices > 1 and 0 <= stage - ahead < num_stages
        sends = num_devices > 1 and 0 <= stage + ahead < num_stages
        part = 0 if action.kind == "F" else 1 + (action.micro_batch == last_micro_batch)
        places[action.kind, stage, action.micro_batch] = place
        steps.append(
            _Step(
                device=stage % num_devices,
                duration=part * num_stages + stage,
                source=places[action.kind, stage - ahead, action.micro_batch] if receives else None,
                received_over=min(stage, stage - ahead) if receives else -1,
                sent_over=min(stage, stage + ahead) if sends else -1,
                link=(stage % num_devices, (stage + ahead) % num_devices),
            )
        )
    return tuple(steps)


def _blocks(num_partitions: int) -> Iterator[slice]:
    for first in range(0, num_partitions, _BLOCK):
        yield slice(first, min(first + _BLOCK, num_partitions))


def _carry(
    steps: Sequence[_Step], num_devices: int, durations: FloatArray, sends: FloatArray, blocks: BoolArray
) -> FloatArray:
    """The latest end, shape (N,), from `durations` (3 S, N) and `sends` (S, N)."""
    begin = np.zeros(durations.shape[1])
    device_free = [begin] * num_devices
    link_free: dict[tuple[int, int], FloatArray] = {}
    arrived: dict[int, FloatArray] = {}
    blocking = blocks.tolist()
    # A transfer of no time starts when it may and holds nobody up, if all of them are such.
    free_of_charge = not sends[:-1].any()
    for place, step in enumerate(steps):
        start = device_free[step.device]
        if step.source is not None:
            start = np.maximum(start, arrived.pop(step.source))
            if blocking[step.received_over]:
                start += sends[step.received_over]
        end = start + durations[step.duration]
        device_free[step.device] = end
        if step.sent_over >= 0:
            if free_of_charge or blocking[step.sent_over]:
                arrived[place] = end
            else:
                crossing = np.maximum(end, link_free.get(step.link, begin))
                crossing += sends[step.sent_over]
                arrived[place] = link_free[step.link] = crossing
    latest: FloatArray = np.maximum.reduce(device_free)
    return latest
