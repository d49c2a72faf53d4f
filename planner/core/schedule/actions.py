"""Schedules as lists of actions per device, in the order in which `torch.distributed.pipelining` runs them.

    GPipe, K = 2, M = 3         1F1B, K = 2, M = 3
    device 0: F0 F1 F2 B0 B1 B2  F0 F1 B0 F2 B1 B2
    device 1: F0 F1 F2 B0 B1 B2  F0 B0 F1 B1 F2 B2

    Interleaved 1F1B, K = 2, M = 2, two chunks per device (F0.1 is the forward of micro-batch 0 on chunk 1)
    device 0: F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
    device 1: F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1

The chain is cut into K V stages; device d runs stages d, K+d, 2K+d, …, its chunks 0, 1, 2, …. V = 1 but for
interleaved 1F1B, so that device k runs stage k.

GPipe: Huang et al. 2019 (arXiv:1811.06965). The paper drains the backward passes in reverse order, torch's
`ScheduleGPipe` in the order of the forward passes; we follow what is executed.
1F1B: Narayanan et al. 2019 (PipeDream), 2021 (PipeDream-Flush, arXiv:2006.09503).
Interleaved 1F1B: Narayanan et al. 2021 (arXiv:2104.04473), where M is a multiple of K and chunks take turns after K
micro-batches each; torch's `ScheduleInterleaved1F1B` needs only M // K turns of equal length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Final, Literal

from planner.core.errors import UsageError
from planner.core.values.limits import MOST_ACTIONS
from planner.core.values.plan import Schedule

__all__ = [
    "Action",
    "Instruction",
    "actions_of",
    "execution_order",
    "num_in_flight",
    "with_transfers",
]

Kind = Literal["F", "B"]
_KINDS: Final[tuple[Kind, Kind]] = ("F", "B")


@dataclass(frozen=True, slots=True)
class Action:
    """Forward (`F`) or backward (`B`) of one micro-batch on one of a device's chunks."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        """`F3`, and from the second chunk on `F3.1`."""
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Instruction:
    """What one device does next, transfers included; `send` and `receive` return at once.

    `F` and `B` after `send` and `receive` say for which action of the receiver.
    """

    kind: Literal["F", "B", "send F", "send B", "receive F", "receive B"]
    micro_batch: int
    chunk: int
    """Of the device whose instruction it is."""


def actions_of(
    schedule: Schedule, *, num_stages: int, micro_batches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The actions of every device, in execution order.

    Args:
        schedule: The schedule.
        num_stages: K: devices in the pipeline, each with `chunks` stages; as many lists are returned.
        micro_batches: M.
        chunks: V: stages per device; 1 unless `schedule` is `interleaved`. Interleaved with one chunk is what the
            engine makes of that: 1F1B that warms up with 2 (K-k) - 1 forwards in place of K-k.

    Raises:
        UsageError: The engine would refuse the schedule with so many micro-batches or chunks.
    """
    if chunks < 1 or (chunks > 1 and schedule != "interleaved"):
        raise UsageError(
            f"{schedule} runs one stage on each device, got {chunks} chunks",
            hint="use one chunk, or the interleaved schedule with one or more",
        )
    if num_stages * chunks * micro_batches > MOST_ACTIONS:
        raise UsageError(
            f"{num_stages * chunks} stages with {micro_batches} micro-batches are more than is simulated",
            hint=f"stages times micro-batches are at most {MOST_ACTIONS}: use fewer micro-batches",
        )
    if schedule == "gpipe":
        return (_one_forward_one_backward(micro_batches, micro_batches),) * num_stages
    if schedule == "interleaved":
        per_round = _micro_batches_per_round(num_stages, micro_batches)
        return tuple(_interleaved(device, num_stages, micro_batches, chunks, per_round) for device in range(num_stages))
    if micro_batches < num_stages:
        raise UsageError(
            f"1F1B needs at least as many micro-batches as stages, got M = {micro_batches}, K = {num_stages}",
            hint="use `--schedule gpipe`, a larger `--batch`, or fewer devices",
        )
    warm_ups = [num_in_flight(schedule, stage, num_stages, micro_batches) for stage in range(num_stages)]
    return tuple(_one_forward_one_backward(warm_up, micro_batches) for warm_up in warm_ups)


def num_in_flight(schedule: Schedule, stage: int, num_stages: int, micro_batches: int) -> int:
    """Most micro-batches that wait for their backward on `stage`: M for GPipe, min(M, K-k) for 1F1B.

    Raises:
        ValueError: The schedule is interleaved, where chunks share a device: see `planner.core.cost.device_memory`.
    """
    if schedule == "interleaved":
        raise ValueError(
            "chunks of an interleaved schedule peak at different moments, see planner.core.cost.device_memory"
        )
    return micro_batches if schedule == "gpipe" else min(micro_batches, num_stages - stage)


def with_transfers(actions: Sequence[Sequence[Action]]) -> tuple[tuple[Instruction, ...], ...]:
    """The actions of an interleaved schedule with the transfers between devices, as the executor runs them.

    Devices take turns with one action each. What an action makes is sent right behind it, and what receives it is put
    behind all that its device has done by then, ahead of its need. Every two devices so have their transfers in the
    same order, and each waits only for what stands in front of it: they cannot block each other.

    Args:
        actions: Per device (K of them), its actions in order.

    Returns:
        Per device, its instructions in order.

    Raises:
        ValueError: The lists wait for each other in a circle, or for what is in no list.
    """
    num_devices = len(actions)
    num_stages = num_devices * (1 + max(action.chunk for row in actions for action in row))
    rows: list[list[Instruction]] = [[] for _ in actions]
    ready = {("F", 0, action.micro_batch) for action in actions[0]}
    position = [0] * num_devices
    while any(at < len(row) for at, row in zip(position, actions, strict=True)):
        before = list(position)
        for device, row in enumerate(actions):
            if position[device] == len(row):
                continue
            action = row[position[device]]
            stage = action.chunk * num_devices + device
            if (action.kind, stage, action.micro_batch) not in ready:
                continue
            position[device] += 1
            rows[device].append(Instruction(action.kind, action.micro_batch, action.chunk))
            if action.kind == "F" and stage == num_stages - 1:
                ready.add(("B", stage, action.micro_batch))
                continue
            neighbour = stage + 1 if action.kind == "F" else stage - 1
            ready.add((action.kind, neighbour, action.micro_batch))
            to, chunk = neighbour % num_devices, neighbour // num_devices
            if neighbour >= 0 and to != device:
                sends: dict[str, Literal["send F", "send B"]] = {"F": "send F", "B": "send B"}
                receives: dict[str, Literal["receive F", "receive B"]] = {"F": "receive F", "B": "receive B"}
                rows[device].append(Instruction(sends[action.kind], action.micro_batch, action.chunk))
                rows[to].append(Instruction(receives[action.kind], action.micro_batch, chunk))
        if position == before:
            raise ValueError(f"deadlock: devices wait for what never comes, at {position}")
    return tuple(map(tuple, rows))


def execution_order(actions: Sequence[Sequence[Action]], num_stages: int) -> tuple[tuple[int, Action], ...]:
    """All actions in an order in which each comes after everything it needs.

    Stage s needs stage s-1 for a forward, stage s+1 for a backward, the last stage its own forward; besides, every
    device keeps the order of its list.

    Args:
        actions: Per device (K of them), its actions in order.
        num_stages: K V, the stages of the chain.

    Returns:
        Pairs of stage and action.

    Raises:
        ValueError: The lists wait for each other in a circle, or for what is in no list.
    """
    order: list[tuple[int, Action]] = []
    forward_done: set[tuple[int, int]] = {(-1, action.micro_batch) for todo in actions for action in todo}
    backward_done: set[tuple[int, int]] = set()
    position = [0] * len(actions)
    left = sum(map(len, actions))
    while left:
        before = left
        for device, todo in enumerate(actions):
            while position[device] < len(todo):
                action = todo[position[device]]
                stage = action.chunk * len(actions) + device
                here = stage, action.micro_batch
                if action.kind == "F":
                    if (stage - 1, action.micro_batch) not in forward_done:
                        break
                    forward_done.add(here)
                else:
                    is_last = stage == num_stages - 1
                    if here not in forward_done if is_last else (stage + 1, action.micro_batch) not in backward_done:
                        break
                    backward_done.add(here)
                order.append((stage, action))
                position[device] += 1
                left -= 1
        if left == before:
            progress = enumerate(zip(actions, position, strict=True))
            waiting = {device: str(todo[at]) for device, (todo, at) in progress if at < len(todo)}
            raise ValueError(f"deadlock: devices wait for what never comes, at {waiting}")
    return tuple(order)


def _one_forward_one_backward(warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    # `warm_up` forwards first, then a backward after each further forward, then the backwards that are left.
    forwards, backwards = _in_order(micro_batches)
    actions = list(forwards[:warm_up])
    for backward, forward in zip_longest(backwards, forwards[warm_up:]):
        actions += (backward,) if forward is None else (backward, forward)
    return tuple(actions)


@lru_cache(maxsize=1)  # every stage of a pipeline runs the same ones, in another order
def _in_order(micro_batches: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    forwards, backwards = ([Action(kind, i) for i in range(micro_batches)] for kind in _KINDS)
    return tuple(forwards), tuple(backwards)


def _micro_batches_per_round(num_devices: int, micro_batches: int) -> int:
    """Micro-batches that a chunk runs before the next chunk has its turn: K, or more where K does not divide M."""
    rounds = max(1, micro_batches // num_devices)
    if micro_batches % rounds:
        fewer = micro_batches - micro_batches % rounds
        raise UsageError(
            f"interleaved 1F1B runs the micro-batches in M // K rounds of equal size, got M = {micro_batches}, "
            f"K = {num_devices}: {rounds} rounds",
            hint=f"use `--micro-batches {fewer}` or a multiple of {num_devices}, or `--schedule 1f1b`",
        )
    return micro_batches // rounds


def _interleaved(device: int, num_devices: int, micro_batches: int, chunks: int, per_round: int) -> tuple[Action, ...]:
    # The order of the engine's `_get_1f1b_rank_ops` without its idle slots, which are drawn and never executed.
    forwards = _in_rounds("F", range(chunks), micro_batches, per_round)
    backwards = _in_rounds("B", range(chunks - 1, -1, -1), micro_batches, per_round)
    warm_up = min(chunks * micro_batches, (chunks - 1) * per_round + 2 * (num_devices - 1 - device))
    steady = chunks * micro_batches - warm_up
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        actions += (forward, backward)
    return (*actions, *backwards[steady:])


def _in_rounds(kind: Literal["F", "B"], chunks: Sequence[int], micro_batches: int, per_round: int) -> list[Action]:
    """Round by round, every chunk in turn with that round's micro-batches."""
    return [
        Action(kind, i, chunk)
        for first in range(0, micro_batches, per_round)
        for chunk in chunks
        for i in range(first, first + per_round)
    ]
