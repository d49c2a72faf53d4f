"""What the executor itself costs on this machine: time per micro-batch and stage, and the link between two processes.

A pipeline of layers that compute nothing is run on one process and on two neighbours. Over gloo a transfer keeps the
receiving stage busy (the engine receives only when it has nothing else to do), so with M micro-batches, overhead o
and transfer t

    one stage    step = 2 M o
    two stages   step = 2 (o + M (o + t)),   t = latency + bytes / bandwidth

for forward and backward together; two message sizes tell latency and bandwidth apart. Smallest of several steps.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn

from planner import __version__
from planner.core.schedule import GPIPE
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.links import fit_link
from planner.device.machine import cpu_name
from planner.executor.run.engine import Engine, EngineStage
from planner.executor.run.shapes import Boundary
from planner.executor.run.stage_module import StageModule
from planner.model.chain import Layer

_MICRO_BATCHES = 8
_STEPS = 12
_SMALL, _LARGE = 1024, 1024 * 1024  # float32 values that cross the boundary: 4 KiB and 4 MiB


def executor_cost(cache: Path) -> ExecutorCost:
    """`measure_executor`, from `cache` if this machine was measured before with this torch; else written there."""
    machine = {"cpu": cpu_name(), "torch": str(torch.__version__), "gpipe-plan": __version__}
    # A cache that cannot be read, or was spoilt, is only a cache.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        cached = json.loads(cache.read_text(encoding="utf-8"))
        if cached["machine"] == machine:
            return ExecutorCost(overhead_us=float(cached["overhead_us"]), link=Link(**cached["link"]))
    cost = measure_executor()
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps({"machine": machine, **asdict(cost)}), encoding="utf-8")
    return cost


def measure_executor() -> ExecutorCost:
    """Starts two processes on the CPU, over gloo; takes a few seconds."""
    with tempfile.TemporaryDirectory() as folder:
        with _without_main():
            started = spawn(_worker, args=(folder,), nprocs=2, join=False)
        while not started.join():
            pass
        one_stage_us, *two_stages_us = (float(text) for text in Path(folder, "steps_us").read_text().split())
    overhead_us = overhead_us_of(one_stage_us)
    times_us = [transfer_us_of(step, overhead_us) for step in two_stages_us]
    return ExecutorCost(
        overhead_us=round(overhead_us, 1), link=fit_link((4 * _SMALL, 4 * _LARGE), times_us, blocking=True)
    )


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Processes started here do not run the caller's main file again, which may be a script without a guard."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def overhead_us_of(alone_us: float) -> float:
    """o, from the step of one stage."""
    return alone_us / (2 * _MICRO_BATCHES)


def transfer_us_of(both_us: float, overhead_us: float) -> float:
    """t, from the step of two stages; not negative."""
    return max(0.0, (both_us / 2 - overhead_us) / _MICRO_BATCHES - overhead_us)


def _worker(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    steps_us = []
    for num_stages, size in ((1, _SMALL), (2, _SMALL), (2, _LARGE)):
        if rank < num_stages:
            store = FileStore(f"{folder}/store_{num_stages}_{size}", num_stages)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_stages)
            steps_us.append(step_us(rank, num_stages, size))
            dist.destroy_process_group()
    if rank == 0:
        Path(folder, "steps_us").write_text(" ".join(map(str, steps_us)))


def step_us(index: int, num_stages: int, size: int, group: ProcessGroup | None = None) -> float:
    """Smallest time of a step of one or two stages on the CPU, of which this process is number `index`.

    So many float32 values cross the boundary. `group` has the processes in order; by default these are all there are.
    """
    is_last = index == num_stages - 1
    crossing = Boundary.of(torch.empty(1, size, device="meta", requires_grad=index > 0))
    module = StageModule(
        [Layer("nothing", _Nothing())],
        received=crossing,
        recompute="never",
        micro_batches=_MICRO_BATCHES,
        loss_fn=_first_value if is_last else None,
        copies_input=False,
    )
    sent = torch.empty(() if is_last else (1, size), device="meta", requires_grad=True)
    stage = EngineStage(module=module, index=index, received=crossing.tensors, sent=(sent,), timer=_untimed)
    engine = Engine(
        [stage],
        num_stages=num_stages,
        ranks=dist.get_process_group_ranks(group),
        device=torch.device("cpu"),
        schedule=GPIPE,
        micro_batches=_MICRO_BATCHES,
        group=group,
    )
    inputs = [torch.zeros(_MICRO_BATCHES, size)] if index == 0 else []
    times = []
    for _ in range(_STEPS):
        begin = time.perf_counter_ns()
        engine.step(inputs, [None] * _MICRO_BATCHES if is_last else [])
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return min(times)


class _Nothing(nn.Module):
    """Passes values and gradients on without touching them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        passed: Tensor = _Pass.apply(value, self.weight)  # type: ignore[no-untyped-call]
        return passed


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.zeros_like(ctx.weight)


def _first_value(output: Tensor, _target: Any) -> Tensor:
    loss: Tensor = _First.apply(output)  # type: ignore[no-untyped-call]
    return loss


class _First(torch.autograd.Function):
    """A loss that costs nothing, neither way."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return ctx.like.detach()


def _untimed(kind: str, work: Callable[[], Any], *, micro_batch: int) -> Any:  # noqa: ARG001 - a `Timer`
    return work()
