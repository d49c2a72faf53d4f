"""Collect the recordings of all processes on the first rank, and make the run report.

All times are converted to the first rank's clock. Processes on the first rank's machine read the same clock. A process
on another machine exchanges a few messages with the first rank. The fastest round trip gives the offset between the
clocks, with an error of at most half of that round trip.
"""

import platform
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from planner.core.schedule import KINDS
from planner.core.values.balance import Balance
from planner.core.values.profile import THIS_TOOL, Device, Environment
from planner.core.values.run_report import RunReport, StageRun
from planner.device.kinds import kind_of
from planner.executor.measure.recorder import WARM_UP_STEPS, RunRecorder
from planner.executor.measure.run_times import ProcessRun, RunStep, with_waits
from planner.executor.run.placement import ProcessPlace, gather_from_all_ranks
from planner.executor.run.stage_module import StageModule
from planner.model.precision import parameter_dtype_name

_ROUND_TRIPS = 16


def run_report(
    balance: Balance,
    place: ProcessPlace,
    recorder: RunRecorder,
    modules: Sequence[StageModule],
    *,
    device: torch.device,
    seed: int,
    losses: Sequence[float],
    samples: Sequence[int],
) -> tuple[list[ProcessRun], RunReport | None]:
    """Collect the recordings of all processes on rank 0. Every rank must call this function.

    Args:
        balance: Balance configuration of the run.
        place: Place of this process in the job.
        recorder: Recorder of this process.
        modules: Modules of this process's stages.
        device: Device of this process.
        seed: Seed of the run.
        losses: Loss of every step.
        samples: Number of samples of every step, over all replicas.

    Returns:
        On rank 0, the recordings of all processes and the run report; on other ranks, an empty list and None.
    """
    kind = kind_of(device)
    steps = _on_clock_of_rank_0(tuple(recorder.steps), place.rank, device)
    recorded = ProcessRun(place.rank, place.replica, steps), _stage_runs(balance, place, recorder, modules)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(recorded, gathered if place.rank == 0 else None)
    if place.rank > 0:
        return [], None
    runs = [run for run, _ in gathered]
    stages = sorted((stage for _, its in gathered for stage in its), key=lambda stage: (stage.replica, stage.index))
    report = RunReport(
        generator=THIS_TOOL,
        plan_digest=balance.plan_digest,
        seed=seed,
        device=Device(kind=kind.name, name=kind.model_name),
        environment=Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            dtype=balance.dtype or parameter_dtype_name(modules[0]),
            threads=balance.threads,
        ),
        losses=tuple(losses),
        step_us=tuple(round(time, 1) for time in recorder.step_us),
        batch=balance.batch,
        samples_per_s=tuple(round(n / time * 1e6, 1) for n, time in zip(samples, recorder.step_us, strict=False)),
        warmup_steps=WARM_UP_STEPS,
        stages=tuple(stages),
    )
    return runs, with_waits(report, runs, overlaps=kind.transfers_overlap)


def clock_offset_ns(
    rank: int, peer: int, device: torch.device, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> int:
    """Measure the offset between the clocks of rank 0 and another rank. Both ranks must call this function.

    Args:
        rank: Rank of this process: 0 or `peer`.
        peer: Rank whose clock is compared with that of rank 0.
        device: Device of the tensors that ranks exchange.
        clock_ns: Function that reads the clock, in nanoseconds.

    Returns:
        On rank `peer`, the nanoseconds to add to its clock; on rank 0, an undefined value.
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


def _on_clock_of_rank_0(steps: tuple[RunStep, ...], rank: int, device: torch.device) -> tuple[RunStep, ...]:
    hosts = gather_from_all_ranks(socket.gethostname())
    offset_ns = 0
    for peer, host in enumerate(hosts):
        if host != hosts[0] and rank in (0, peer):
            offset_ns = clock_offset_ns(rank, peer, device)
    return steps if rank == 0 else tuple(_shifted(step, offset_ns) for step in steps)


def _shifted(step: RunStep, offset_ns: int) -> RunStep:
    spans = (s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in step.spans)
    return step._replace(spans=tuple(spans))


def _stage_runs(
    balance: Balance, place: ProcessPlace, recorder: RunRecorder, modules: Sequence[StageModule]
) -> list[StageRun]:
    described = [balance.stages[index] for index in place.stages]
    return [
        StageRun(
            index=stage.index,
            replica=place.replica,
            first=stage.layers[0],
            last=stage.layers[-1],
            forward_us=round(recorder.typical_action_us("forward", stage=stage.index), 1),
            backward_us=round(recorder.typical_action_us("backward", stage=stage.index), 1),
            backward_input_us=round(recorder.typical_action_us(KINDS["I"].label, stage=stage.index), 1),
            backward_weight_us=round(recorder.typical_action_us(KINDS["W"].label, stage=stage.index), 1),
            recompute_us=round(recorder.typical_action_us("recompute", stage=stage.index), 1),
            parameter_bytes=sum(p.nbytes for p in module.parameters()),
            peak_bytes=recorder.peak.tensor_bytes,
            outside_bytes=recorder.peak.outside_bytes,
            core_share=round(recorder.core_share, 3),
        )
        for stage, module in zip(described, modules, strict=True)
    ]
