"""What every process of a run did, brought together on the clock of the first.

On one machine all processes read the same clock (`time.perf_counter_ns` counts from the machine's start). A process on
another machine answers a few calls of the first with its time; half of the fastest round trip ago it was that time
there, give or take the other half.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.core.run_report import BoundaryRun, StageRun
from planner.core.run_times import RunSpanKind, RunStep, Waiting, waiting_of

__all__ = ["ProcessRun", "Waits", "clock_offset_ns", "gather_runs"]

_ROUND_TRIPS = 16


class ProcessRun(NamedTuple):
    """What one process did."""

    rank: int
    replica: int
    steps: tuple[RunStep, ...]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What the processes waited for, as a report tells it."""

    stages: tuple[StageRun, ...]
    boundaries: tuple[BoundaryRun, ...]
    bubble: float | None
    overhead_us: float | None

    @classmethod
    def of(cls, runs: Sequence[ProcessRun], stages: Sequence[StageRun], *, warm_up: int, overlaps: bool) -> "Waits":
        """Of all pipelines side by side.

        Args:
            runs: What every process did.
            stages: What is known of every stage; its waiting is added.
            warm_up: Steps that do not count.
            overlaps: Whether transfers go on while the receiver computes.
        """
        found: dict[int, Waiting] = {}
        for replica in {run.replica for run in runs}:
            mine = [run for run in runs if run.replica == replica]
            steps = {run.rank: [step for step in run.steps if step.number >= warm_up] for run in mine}
            waiting = waiting_of(steps, overlaps=overlaps)
            if waiting is not None:
                found[replica] = waiting
        overheads = [waiting.overhead_us for waiting in found.values() if waiting.overhead_us is not None]
        ranks = {(run.replica, span.stage): run.rank for run in runs for step in run.steps for span in step.spans}
        return cls(
            stages=tuple(_with_waiting(s, found.get(s.replica), ranks.get((s.replica, s.index), 0)) for s in stages),
            boundaries=tuple(b for replica, waiting in sorted(found.items()) for b in _boundaries(replica, waiting)),
            bubble=mean(w.bubble for w in found.values()) if found else None,
            overhead_us=round(mean(overheads), 1) if overheads else None,
        )


def gather_runs(mine: ProcessRun, device: torch.device) -> list[ProcessRun] | None:
    """Everybody's runs by rank, on the clock of rank 0, which gets them; None elsewhere. Every rank must call it."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    offset_ns = 0
    for peer, host in enumerate(hosts):
        if host != hosts[0] and mine.rank in (0, peer):
            offset_ns = clock_offset_ns(mine.rank, peer, device)
    steps = tuple(_moved(step, offset_ns) for step in mine.steps) if mine.rank > 0 else mine.steps
    gathered: list[ProcessRun | None] = [None] * dist.get_world_size()
    dist.gather_object(mine._replace(steps=steps), gathered if mine.rank == 0 else None)
    return [run for run in gathered if run is not None] if mine.rank == 0 else None


def clock_offset_ns(
    rank: int, peer: int, device: torch.device, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> int:
    """What must be added to the clock of `peer` to have that of rank 0; both of them must call it.

    Args:
        rank: This process: 0 or `peer`.
        peer: The other one.
        device: Where messages lie.
        clock_ns: This process's clock.

    Returns:
        In `peer` the offset; in rank 0 nothing of use.
    """
    told = torch.zeros(2, dtype=torch.int64, device=device)
    best = (float("inf"), 0)
    for _ in range(_ROUND_TRIPS):
        if rank == peer:
            sent_ns = clock_ns()
            dist.send(told, 0)
            dist.recv(told, 0)
            there_ns = int(told[0])  # waits for the device
            here_ns = clock_ns()
            best = min(best, (here_ns - sent_ns, there_ns - (sent_ns + here_ns) // 2))
        else:
            dist.recv(told, peer)
            int(told[0])
            told[0] = clock_ns()
            dist.send(told, peer)
    return best[1]


# Private functions


def _with_waiting(stage: StageRun, waiting: Waiting | None, rank: int) -> StageRun:
    if waiting is None:
        return stage
    transfer_us, idle_us = waiting.transfer_us.get(stage.index, 0.0), waiting.idle_us.get(rank, 0.0)
    return replace(stage, transfer_us=round(transfer_us, 1), idle_us=round(idle_us, 1))


def _boundaries(replica: int, waiting: Waiting) -> Iterator[BoundaryRun]:
    for index in sorted({boundary for _, boundary in waiting.crossing_us}):
        forward_us, backward_us = (waiting.crossing_us.get((kind, index), 0.0) for kind in _DIRECTIONS)
        yield BoundaryRun(
            index=index, replica=replica, forward_us=round(forward_us, 1), backward_us=round(backward_us, 1)
        )


_DIRECTIONS: tuple[RunSpanKind, ...] = ("forward", "backward")


def _moved(step: RunStep, offset_ns: int) -> RunStep:
    spans = (s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in step.spans)
    return step._replace(spans=tuple(spans))
