"""What every process of a run did, brought together on the clock of the first.

On one machine all processes read the same clock (`time.perf_counter_ns` counts from the machine's start). A process on
another machine answers a few calls of the first with its time; half of the fastest round trip ago it was that time
there, give or take the other half.
"""

import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from planner.executor.measure.run_times import ProcessRun, RunStep

__all__ = ["clock_offset_ns", "gather_runs"]

_ROUND_TRIPS = 16


def gather_runs(run: ProcessRun, device: torch.device) -> list[ProcessRun] | None:
    """Everybody's runs by rank, on the clock of rank 0, which gets them; None elsewhere. Every rank must call it."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    offset_ns = 0
    for peer, host in enumerate(hosts):
        if host != hosts[0] and run.rank in (0, peer):
            offset_ns = clock_offset_ns(run.rank, peer, device)
    steps = tuple(_moved(step, offset_ns) for step in run.steps) if run.rank > 0 else run.steps
    gathered: list[ProcessRun | None] = [None] * dist.get_world_size()
    dist.gather_object(run._replace(steps=steps), gathered if run.rank == 0 else None)
    return [each for each in gathered if each is not None] if run.rank == 0 else None


def clock_offset_ns(
    rank: int, peer: int, device: torch.device, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> int:
    """What must be added to the clock of `peer` to have that of rank 0; both of them must call it.

    This process is `rank`, 0 or `peer`; messages lie on `device`.

    Returns:
        In `peer` the offset; in rank 0 nothing of use.
    """
    message = torch.zeros(2, dtype=torch.int64, device=device)
    best = (float("inf"), 0)
    for _ in range(_ROUND_TRIPS):
        if rank == peer:
            sent_ns = clock_ns()
            dist.send(message, 0)
            dist.recv(message, 0)
            there_ns = int(message[0])  # waits for the device
            here_ns = clock_ns()
            best = min(best, (here_ns - sent_ns, there_ns - (sent_ns + here_ns) // 2))
        else:
            dist.recv(message, peer)
            int(message[0])
            message[0] = clock_ns()
            dist.send(message, peer)
    return best[1]


# Private functions


def _moved(step: RunStep, offset_ns: int) -> RunStep:
    spans = (s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in step.spans)
    return step._replace(spans=tuple(spans))
