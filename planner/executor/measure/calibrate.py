"""Cost of the executor on this machine: time per micro-batch and stage, and the link between two processes.

A pipeline of two processes runs layers that compute nothing, and is analyzed like any run (`run_times.py`). Two message
sizes separate latency and bandwidth. Over gloo, a transfer keeps the receiving stage busy.

The layers write more memory than the cache holds, as real layers do. Otherwise the executor's data would stay in the
cache, and the measured time would be several times too short.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn

from planner import __version__
from planner.core.schedule import GPIPE, Label
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.links import fit_link
from planner.core.values.run_report import LEAST_CORE_SHARE
from planner.device.machine import CACHE_BYTES, cpu_name, thread_time
from planner.executor.measure.run_times import RunSpan, RunStep, mean_waits
from planner.executor.run.engine import ActionTimer, Engine, EngineStage
from planner.executor.run.shapes import Boundary
from planner.executor.run.stage_module import StageModule
from planner.model.chain import Layer

MICRO_BATCHES = 8
_WARM_UPS, _STEPS = 2, 8
_SIZES = 1024, 1024 * 1024
"""Numbers of float32 values in a message between the two processes: 4 KiB and 4 MiB."""


class MeasuredExecutor(NamedTuple):
    """Result of `measure_executor`: the executor's cost, and whether it was measured without disturbance."""

    cost: ExecutorCost
    is_alone: bool
    """True if no other program slowed the processes down. Otherwise, `executor_cost` does not store the cost."""


def executor_cost(cache: Path, *, warn: Callable[[str], None]) -> ExecutorCost:
    """Return the executor's cost from the file `cache`, or measure the cost and store it in this file.

    A stored cost is valid for this machine and this version of torch. If other programs run during the measurement, the
    cost is not stored, and `warn` is called with a message.
    """
    machine = {"cpu": cpu_name(), "torch": str(torch.__version__), "gpipe-plan": __version__}
    # If the file is missing or damaged, the cost is measured again.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        cached = json.loads(cache.read_text(encoding="utf-8"))
        if cached["machine"] == machine:
            return ExecutorCost(overhead_us=float(cached["overhead_us"]), link=Link(**cached["link"]))
    cost, is_alone = measure_executor()
    if not is_alone:
        warn(
            "other programs slow this machine down: the measured times of the executor "
            f"({cost.overhead_us:.0f} us per micro-batch and stage) and of its link are too long; end these programs, "
            "and profile again"
        )
        return cost
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps({"machine": machine, **asdict(cost)}), encoding="utf-8")
    return cost


def measure_executor() -> MeasuredExecutor:
    """Measure the executor's cost with two processes on the CPU, over gloo. This takes a few seconds."""
    with tempfile.TemporaryDirectory() as folder:
        with _without_main():
            started = spawn(_worker, args=(folder,), nprocs=2, join=False)
        while not started.join():
            pass
        runs = {size: {rank: _read_run(folder, rank, size) for rank in range(2)} for size in _SIZES}
    # All processes of one machine have one clock.
    processes = ({rank: run.steps for rank, run in each.items()} for each in runs.values())
    small, large = (mean_waits(steps, overlaps=False) for steps in processes)
    assert small is not None
    assert small.overhead_us is not None
    assert large is not None
    times_us = [max(0.0, statistics.fmean(waits.crossing_us.values()) - small.overhead_us) for waits in (small, large)]
    cost = ExecutorCost(
        overhead_us=round(small.overhead_us, 1), link=fit_link([4 * size for size in _SIZES], times_us, blocking=True)
    )
    shares = [run.core_share for each in runs.values() for run in each.values() if run.core_share]
    return MeasuredExecutor(cost, min(shares, default=1.0) >= LEAST_CORE_SHARE)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Prevent processes that are started in the block from running the caller's main file."""
    # The file may lack an `if __name__ == "__main__"` guard.
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _worker(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    for size in _SIZES:
        store = dist.FileStore(f"{folder}/store_{size}", 2)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        spans: list[RunSpan] = []
        step = make_empty_step(rank, 2, size, timer=partial(_timed, spans, rank), overwrites_cache=True)
        steps = []
        for number in range(_WARM_UPS + _STEPS):
            if number == _WARM_UPS:
                warm = thread_time()
            step()
            steps.append(RunStep(number, tuple(spans)))
            spans.clear()
        run = _Run(tuple(steps[_WARM_UPS:]), thread_time().since(warm).share)
        _run_path(folder, rank, size).write_text(json.dumps(run), encoding="utf-8")
        dist.destroy_process_group()


class _Run(NamedTuple):
    """Steps that one process of `measure_executor` recorded with one message size."""

    steps: tuple[RunStep, ...]
    core_share: float
    """Run time of the main thread, divided by its run time plus its wait for a free CPU core; 0 if unknown."""


def _timed(spans: list[RunSpan], stage: int, kind: Label, work: Callable[[], Any], *, micro_batch: int) -> Any:
    begin_ns = time.perf_counter_ns()
    result = work()
    spans.append(RunSpan(kind, stage, micro_batch, begin_ns, time.perf_counter_ns()))
    return result


def _run_path(folder: str, rank: int, size: int) -> Path:
    return Path(folder, f"run_{rank}_{size}")


def _read_run(folder: str, rank: int, size: int) -> _Run:
    steps, core_share = json.loads(_run_path(folder, rank, size).read_text(encoding="utf-8"))
    return _Run(tuple(RunStep(number, tuple(RunSpan(*span) for span in spans)) for number, spans in steps), core_share)


def make_empty_step(
    index: int,
    num_stages: int,
    size: int,
    *,
    group: ProcessGroup | None = None,
    timer: ActionTimer | None = None,
    overwrites_cache: bool = False,
) -> Callable[[], None]:
    """Return a function that runs one step of a CPU pipeline without arithmetic.

    Args:
        index: Index of the stage that this process runs.
        num_stages: Number of stages, 1 or 2. Each process runs one stage.
        size: Number of float32 values that each forward and each backward of a micro-batch sends.
        group: Processes of the pipeline, in order; by default all processes.
        timer: Function that runs and times every forward and backward; by default, they are not timed.
        overwrites_cache: If true, each layer overwrites the CPU cache, as layers with arithmetic do.
    """
    is_last = index == num_stages - 1
    crossing = Boundary.of(torch.empty(1, size, device="meta", requires_grad=index > 0))
    module = StageModule(
        [Layer("nothing", _PassThrough(torch.zeros(CACHE_BYTES // 4 if overwrites_cache else 0)))],
        received=crossing,
        recompute="never",
        micro_batches=MICRO_BATCHES,
        loss_fn=_first_value if is_last else None,
        copies_input=False,
    )
    sent = torch.empty(() if is_last else (1, size), device="meta", requires_grad=True)
    stage = EngineStage(module=module, index=index, received=crossing.tensors, sent=(sent,), timer=timer or _untimed)
    engine = Engine(
        [stage],
        num_stages=num_stages,
        ranks=dist.get_process_group_ranks(group),
        device=torch.device("cpu"),
        schedule=GPIPE,
        micro_batches=MICRO_BATCHES,
        group=group,
    )
    inputs = [torch.zeros(MICRO_BATCHES, size)] if index == 0 else []

    def step() -> None:
        engine.step(inputs, [None] * MICRO_BATCHES if is_last else [])

    return step


class _PassThrough(nn.Module):
    def __init__(self, scratch: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.scratch = scratch

    def forward(self, value: Tensor) -> Tensor:
        passed: Tensor = _Identity.apply(value, self.weight, self.scratch)  # type: ignore[no-untyped-call]
        return passed


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, scratch: Tensor) -> Tensor:
        ctx.weight, ctx.scratch = weight, scratch
        scratch.zero_()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.scratch.zero_()
        return gradient, torch.zeros_like(ctx.weight), None


def _first_value(output: Tensor, _target: Any) -> Tensor:
    loss: Tensor = _ZeroLoss.apply(output)  # type: ignore[no-untyped-call]
    return loss


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return ctx.like.detach()


def _untimed(kind: str, work: Callable[[], Any], *, micro_batch: int) -> Any:  # noqa: ARG001 - an `ActionTimer`
    return work()
