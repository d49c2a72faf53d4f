"""The executor's own cost: layers that only sleep, measured steps beside the simulated ones and a bare torch loop.

    python benchmarks/executor.py [--peers PYTHON] > docs/measurements/executor.md
    python benchmarks/executor.py --quick

A stage is one layer that sleeps in forward and in each pass of its backward, so that nothing but schedule, transfers
and bookkeeping is measured. K processes over gloo run every case with the executor and, where backwards run in one
piece, with torch's own `ScheduleGPipe`, `Schedule1F1B` or `ScheduleInterleaved1F1B` as it is, a step of the one after a
step of the other. The constant per micro-batch, stage and direction is what the even case with most micro-batches takes
beyond its simulated time, for each K and schedule; the other cases are predicted with it. Where a device runs two
stages, each is half as long. `--peers` names a Python with `torch` and `torchgpipe`, which then runs the same cases
with its threads. A busy machine makes sleeps longer: use a quiet one.

Peak memory is that of one more step, in which every layer keeps 4 MiB for its backward: how far the memory of all
processes rises above what it was before the step (`VmHWM` of Linux, written anew by `/proc/self/clear_refs`).
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from planner.core.cost.simulate import StageTimes, last_end_us
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import ScheduleName
from planner.core.values.profile import Model
from planner.device.machine import cpu_name
from planner.executor import Pipeline
from planner.files import write
from planner.model.split_backward import DeferredUses, SplitBackward

UNIT_US = 8_000.0
"""Forward of a stage, and each pass of its backward."""

UNEVEN = (1.0, 2.0, 1.5, 0.5)
"""Shares of the stages where they are uneven, over and over."""

STEPS, WARM_UPS = 6, 2
WIDTH = 16

KEPT = 4 * 2**20
"""Bytes that every layer keeps per micro-batch where memory is measured."""

MODEL = (
    f"KEPT = {KEPT}"
    """
import ctypes
import time

import torch
from torch import nn

IN_INPUT_BACKWARD = False  # whether the gradients of weights come later
SECONDS = {}  # by weight, how long its gradient sleeps


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, seconds, kept):
        ctx.seconds = seconds
        ctx.save_for_backward(torch.ones(kept))
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds if IN_INPUT_BACKWARD else 2 * ctx.seconds)
        return gradient, None, None


class Sleeping(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.kept = 0
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, value):
        SECONDS[id(self.weight)] = self.seconds
        value = nn.functional.linear(value, self.weight)
        return _Sleep.apply(value, 0.0 if value.is_meta else self.seconds, self.kept)


def peak_bytes(model, step):
    # By how much the process's memory rises in a step in which layers keep something, and do not sleep.
    for layer in model.modules():
        if hasattr(layer, "kept"):
            layer.kept, layer.seconds = KEPT // 4, 0.0
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free would be used again, and nothing rise
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def build_model(seconds=""):
    return nn.Sequential(*(Sleeping(float(text)) for text in seconds.split("/")))


def example_batch(batch_size):
    return torch.zeros(batch_size, 16), torch.zeros(batch_size)


def loss_fn(output, target):
    return output.mean()


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pipeline."""

    num_devices: int
    micro_batches: int
    schedule: ScheduleName
    is_even: bool

    @property
    def chunks(self) -> int:
        """Number of stages per device."""
        return 2 if SCHEDULES[self.schedule].is_chunked else 1

    @property
    def forward_us(self) -> list[float]:
        """Forward time of every stage."""
        shares = (1.0,) if self.is_even else UNEVEN
        return [UNIT_US / self.chunks * shares[k % len(shares)] for k in range(self.num_devices * self.chunks)]

    def step_us(self, constant_us: float = 0.0) -> float:
        """Return the simulated step, which under GPipe is the closed form."""
        stages = [
            StageTimes(
                forward_us=time_us + constant_us,
                backward_us=2 * time_us + constant_us,
                last_backward_us=2 * time_us + constant_us,
                input_backward_us=time_us + constant_us,
                last_input_backward_us=time_us + constant_us,
                weight_backward_us=time_us + constant_us,
            )
            for time_us in self.forward_us
        ]
        rule = SCHEDULES[self.schedule]
        # Steps are timed one by one here: no device begins the next one before all have ended this one.
        return last_end_us(rule.actions(self.num_devices, self.micro_batches, self.chunks), stages)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Median step times of one case, and the median ratio of pairs of steps."""

    ours_us: float
    bare_us: float | None
    ratio: float | None
    peak_bytes: int
    """Of ours, all processes together."""


def main() -> None:
    """Measure all cases, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="K = 4 and M = 4, 8 alone")
    parser.add_argument("--peers", metavar="PYTHON", help="one that has torch and torchgpipe")
    parser.add_argument("--devices", type=int, nargs="*", default=[2, 3, 4, 8], help="K")
    given = parser.parse_args()
    _print_head()
    notes = []
    for num_devices in (4,) if given.quick else given.devices:
        cases = list(_cases(num_devices, (4, 8) if given.quick else (2 * num_devices, 32)))
        found = _measure(cases)
        constants_us = _constants_us(cases, found)
        peers = _peer_steps(given.peers, cases) if given.peers else [None] * len(cases)
        for case, measured, peer in zip(cases, found, peers, strict=True):
            _print_row(case, measured, constants_us[case.schedule], peer)
        ratios = [one.ratio for one in found if one.ratio is not None]
        notes.append(
            f"K = {num_devices}: the executor's own time per micro-batch, stage and direction was "
            f"{', '.join(f'{time_us:.0f} us ({schedule})' for schedule, time_us in constants_us.items())}; "
            f"a step took {statistics.median(ratios):.3f} times as long as a step of torch's own engine (median; "
            f"{max(ratios):.3f} at most). {_order(cases, found, constants_us)}"
        )
    print("\n" + "\n".join(notes))


def _cases(num_devices: int, counts: Sequence[int]) -> Iterator[Case]:
    for is_even, micro_batches, schedule in product((True, False), counts, SCHEDULES):
        case = Case(num_devices=num_devices, micro_batches=micro_batches, schedule=schedule, is_even=is_even)
        with contextlib.suppress(UsageError):
            SCHEDULES[schedule].check_supported(num_devices, micro_batches, case.chunks)
            yield case


def _order(cases: Sequence[Case], found: Sequence[Measured], constants_us: dict[ScheduleName, float]) -> str:
    """Return a sentence on the error, and on pairs of schedules that were measured in another order than predicted."""
    error = max(
        abs(one.ours_us / case.step_us(constants_us[case.schedule]) - 1) for case, one in zip(cases, found, strict=True)
    )
    count = swapped = 0
    for (a, first), (b, second) in combinations(zip(cases, found, strict=True), 2):
        ratio = a.step_us(constants_us[a.schedule]) / b.step_us(constants_us[b.schedule])
        is_alike = (a.micro_batches, a.is_even) == (b.micro_batches, b.is_even)
        if is_alike and abs(ratio - 1) > 2 * error:
            count += 1
            swapped += (first.ours_us < second.ours_us) != (ratio < 1)
    return (
        f"Predictions are off by {error:.1%} at most; of {count} pairs of schedules whose predictions differ by more "
        f"than twice this error, {swapped} were measured in the other order."
    )


def _constants_us(cases: Sequence[Case], found: Sequence[Measured]) -> dict[ScheduleName, float]:
    """Return the time of forwards and backwards beyond their sleep, by schedule."""
    constants = {}
    # The last even one has the most micro-batches.
    for case, measured in zip(cases, found, strict=True):
        if case.is_even:
            per_us = case.step_us(1.0) - case.step_us()
            constants[case.schedule] = max(0.0, (measured.ours_us - case.step_us()) / per_us)
    return constants


def _measure(cases: Sequence[Case]) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.py").write_text(MODEL, encoding="utf-8")
        for n, case in enumerate(cases):
            write(str(Path(folder, f"{n}.yaml")), _balance(case))
        Path(folder, "cases.json").write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
        num_devices = str(cases[0].num_devices)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_devices]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", _WORKER: "1"}
        done = subprocess.run(
            [*command, __file__], cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return [Measured(**found) for found in json.loads(Path(folder, "measured.json").read_text(encoding="utf-8"))]


def _balance(case: Case) -> Balance:
    seconds = "/".join(str(time_us / 1e6) for time_us in case.forward_us)
    return Balance(
        plan_digest="sha256:benchmark",
        model=Model(source="model.py:build_model", settings={"seconds": seconds}),
        schedule=case.schedule,
        batch=case.micro_batches,
        micro_batches=case.micro_batches,
        chunks=case.chunks,
        placement=SCHEDULES[case.schedule].placement,
        balance=(1,) * len(case.forward_us),
        stages=tuple(StageBalance(index=k, recompute="never", layers=(str(k),)) for k in range(len(case.forward_us))),
    )


# What one of the processes does

_WORKER = "GPIPE_PLAN_EXECUTOR_BENCHMARK"


def _work() -> None:
    dist.init_process_group("gloo")
    cases = [Case(**case) for case in json.loads(Path("cases.json").read_text(encoding="utf-8"))]
    found = [_compare(f"{n}.yaml", case) for n, case in enumerate(cases)]
    if dist.get_rank() == 0:
        Path("measured.json").write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
    dist.destroy_process_group()


def _compare(balance: str, case: Case) -> Measured:
    """Measure steps of both in turn, without the first ones."""
    sys.path.insert(0, str(Path.cwd()))
    from model import peak_bytes  # type: ignore[import-not-found] # noqa: PLC0415 - written just now

    pipeline = Pipeline(balance)
    _sleep_in_w(pipeline)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    (batch,) = pipeline.batches(1)

    def ours() -> None:
        with pipeline.step(*batch):
            optimizer.step()
            optimizer.zero_grad()

    # Torch's own split of a backward would sleep twice.
    bare = None if SCHEDULES[case.schedule].splits_backward else _Bare(pipeline.model.build(), case)
    pairs = [(_timed_us(ours), 0.0 if bare is None else _timed_us(bare.step)) for _ in range(WARM_UPS + STEPS)]
    counted = pairs[WARM_UPS:]
    dist.barrier()
    peaks: list[Any] = [0] * case.num_devices
    dist.all_gather_object(peaks, peak_bytes(torch.nn.ModuleList(pipeline.modules), ours))
    pipeline.close()
    return Measured(
        ours_us=statistics.median(a for a, _ in counted),
        bare_us=None if bare is None else statistics.median(b for _, b in counted),
        ratio=None if bare is None else statistics.median(a / b for a, b in counted),
        peak_bytes=sum(peaks),
    )


def _sleep_in_w(pipeline: Pipeline) -> None:
    """Let weight gradients sleep in their own pass, with the rest of the backward or later."""
    layer = next(layer for layer in pipeline.modules[0].modules() if hasattr(layer, "seconds"))
    state = type(layer).forward.__globals__  # type: ignore[attr-defined]

    def backward_input(self: SplitBackward, *arguments: Any) -> DeferredUses:
        state["IN_INPUT_BACKWARD"] = True
        try:
            return input_of(self, *arguments)
        finally:
            state["IN_INPUT_BACKWARD"] = False

    def backward_weight(self: SplitBackward, put_off: DeferredUses) -> None:
        time.sleep(sum(state["SECONDS"][id(use.operands.weight)] for use in put_off))
        weight_of(self, put_off)

    input_of, weight_of = _SPLIT
    SplitBackward.backward_input, SplitBackward.backward_weight = backward_input, backward_weight  # type: ignore[method-assign]


_SPLIT = SplitBackward.backward_input, SplitBackward.backward_weight


def _timed_us(step: Any) -> float:
    dist.barrier()
    begin = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - begin) / 1e3


class _Bare:
    """Training loop with torch's engine."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        rank = dist.get_rank()
        self._is_first, self._is_last = rank == 0, rank == case.num_devices - 1
        num_stages = case.num_devices * case.chunks
        stages = []
        for index in range(rank, num_stages, case.num_devices):
            given, made = torch.zeros(1, WIDTH, requires_grad=index > 0), torch.zeros(1, WIDTH, requires_grad=True)
            layer = model[index]  # type: ignore[index]
            device = torch.device("cpu")
            stages.append(PipelineStage(layer, index, num_stages, device, input_args=given, output_args=made))
        loop: Any = get_schedule_class(SCHEDULES[case.schedule].torch_name)
        run = stages if case.chunks > 1 else stages[0]
        self._schedule = loop(run, case.micro_batches, loss_fn=lambda output, _target: output.mean())
        self._optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
        self._inputs = torch.zeros(case.micro_batches, WIDTH)
        self._targets = torch.zeros(case.micro_batches)

    def step(self) -> None:
        """One training step."""
        losses: list[torch.Tensor] = []
        inputs = (self._inputs,) if self._is_first else ()
        target = {"target": self._targets, "losses": losses} if self._is_last else {}
        self._schedule.step(*inputs, **target)  # type: ignore[arg-type]
        self._optimizer.step()
        self._optimizer.zero_grad()


# torchgpipe

_PEER = """
import json, statistics, sys, time
import torch
from torchgpipe import GPipe
sys.path.insert(0, sys.argv[1])
from model import build_model, peak_bytes
for case in json.loads(sys.argv[2]):
    k, m = case["num_devices"], case["micro_batches"]
    piped = GPipe(build_model(case["seconds"]), balance=[1] * k, devices=["cpu"] * k, chunks=m, checkpoint="never")
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1)
    times = []

    def step():
        begin = time.perf_counter()
        piped(torch.zeros(m, 16, requires_grad=True)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begin) * 1e6)

    for _ in range(case["steps"]):
        step()
    print(statistics.median(times[1:]), peak_bytes(piped, step), flush=True)
"""


def _peer_steps(python: str, cases: Sequence[Case]) -> list[tuple[float, int] | None]:
    """Return time and memory of torchgpipe, which runs GPipe only; its "devices" are threads."""
    mine = [case for case in cases if case.schedule == "gpipe"]
    described = [
        asdict(case) | {"seconds": _balance(case).model.settings["seconds"], "steps": 1 + STEPS // 2} for case in mine
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.py").write_text(MODEL, encoding="utf-8")
        command = [python, "-c", _PEER, folder, json.dumps(described)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    lines = iter(done.stdout.splitlines())
    found = [next(lines, None) if case.schedule == "gpipe" else None for case in cases]
    return [None if line is None else (float(line.split()[0]), int(line.split()[1])) for line in found]


def _print_head() -> None:
    print("# The executor's own cost\n")
    print(f"`{shlex.join(['python', *sys.argv])}` on {cpu_name()} ({os.cpu_count()} cores), ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}; load average {os.getloadavg()[0]:.1f}.")
    print(
        f"Each stage is one layer that sleeps {UNIT_US / 1e3:.0f} ms in the forward, in the input-gradient pass and\n"
        f"in the weight-gradient pass. *Uneven* stages sleep {', '.join(f'{share:g}' for share in UNEVEN)} times as\n"
        f"long, in turn. If a device has two stages, each sleeps half as long. Times are medians of {STEPS} steps.\n"
        "Peak memory is the sum over all processes, above the memory in use before the step, in a step in which every\n"
        f"layer saves {KEPT >> 20} MiB per micro-batch.\n"
    )
    columns = ["K", "stages", "M", "schedule", "simulated", "with constant", "measured", "difference"]
    columns += ["bare torch", "ours / bare", "torchgpipe", "peak memory", "of torchgpipe"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")


def _print_row(case: Case, measured: Measured, constant_us: float, peer: tuple[float, int] | None) -> None:
    predicted_us = case.step_us(constant_us)
    cells = (
        case.num_devices,
        "even" if case.is_even else "uneven",
        case.micro_batches,
        case.schedule,
        f"{case.step_us() / 1e3:.1f} ms",
        f"{predicted_us / 1e3:.1f} ms",
        f"{measured.ours_us / 1e3:.1f} ms",
        f"{measured.ours_us / predicted_us - 1:+.1%}",
        "" if measured.bare_us is None else f"{measured.bare_us / 1e3:.1f} ms",
        "" if measured.ratio is None else f"{measured.ratio:.3f}",
        "" if peer is None else f"{peer[0] / 1e3:.1f} ms",
        f"{measured.peak_bytes / 2**20:.0f} MiB",
        "" if peer is None else f"{peer[1] / 2**20:.0f} MiB",
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    _work() if _WORKER in os.environ else main()
