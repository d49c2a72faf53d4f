"""What a run took, put together on the first rank from what every process recorded."""

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from planner import __version__
from planner.core.values.balance import Balance
from planner.core.values.profile import Device, Environment, Generator
from planner.core.values.run_report import RunReport, StageRun
from planner.device.kinds import kind_of
from planner.executor.measure.recorder import WARM_UP_STEPS, Recorder
from planner.executor.measure.run_times import ProcessRun, Waits
from planner.executor.measure.timeline import gather_runs
from planner.executor.run.placement import Place
from planner.executor.run.stage_module import StageModule
from planner.model.precision import dtype_of

__all__ = ["run_report"]


def run_report(
    balance: Balance,
    place: Place,
    recorder: Recorder,
    modules: Sequence[StageModule],
    *,
    device: torch.device,
    seed: int,
    losses: Sequence[float],
    samples: Sequence[int],
) -> tuple[list[ProcessRun], RunReport | None]:
    """What every process did and what the run took, on rank 0; nothing elsewhere. Every rank must call it.

    Args:
        balance: The balance configuration.
        place: Where this process is.
        recorder: Of this process.
        modules: Its stages.
        device: Where they run.
        seed: The run's.
        losses: Of every step.
        samples: Of every step, over all replicas.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    own = _stage_runs(balance, place, recorder, modules)
    dist.gather_object(own, gathered if place.rank == 0 else None)
    runs = gather_runs(ProcessRun(place.rank, place.replica, recorder.steps), device)
    if runs is None:
        return [], None
    stages = sorted((run for runs in gathered for run in runs), key=lambda run: (run.replica, run.index))
    kind = kind_of(device)
    waits = Waits.of(runs, stages, warm_up=WARM_UP_STEPS, overlaps=kind.transfers_overlap)
    report = RunReport(
        generator=Generator(name="gpipe-plan", version=__version__),
        plan_digest=balance.plan_digest,
        seed=seed,
        device=Device(kind=kind.name, name=kind.model_name),
        environment=Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            dtype=balance.dtype or dtype_of(modules[0]),
            threads=balance.threads,
        ),
        losses=tuple(losses),
        step_us=tuple(round(time, 1) for time in recorder.step_us),
        batch=balance.batch,
        samples_per_s=tuple(
            round(count / time_us * 1e6, 1) for count, time_us in zip(samples, recorder.step_us, strict=False)
        ),
        bubble=waits.bubble,
        overhead_us=waits.overhead_us,
        warmup_steps=WARM_UP_STEPS,
        stages=waits.stages,
        boundaries=waits.boundaries,
    )
    return runs, report


# Private functions


def _stage_runs(balance: Balance, place: Place, recorder: Recorder, modules: Sequence[StageModule]) -> list[StageRun]:
    described = [balance.stages[index] for index in place.stages]
    return [
        StageRun(
            index=stage.index,
            replica=place.replica,
            first=stage.layers[0],
            last=stage.layers[-1],
            forward_us=round(recorder.typical_us("forward", stage=stage.index), 1),
            backward_us=round(recorder.typical_us("backward", stage=stage.index), 1),
            recompute_us=round(recorder.typical_us("recompute", stage=stage.index), 1),
            parameter_bytes=sum(p.nbytes for p in module.parameters()),
            peak_bytes=recorder.peak_bytes,
            outside_bytes=recorder.outside_bytes,
        )
        for stage, module in zip(described, modules, strict=True)
    ]
