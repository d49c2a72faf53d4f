"""Tests of clock, memory meter and profiler on a CUDA device."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.core.values.plan import Recompute
from planner.device.clock import median_us
from planner.device.cuda import Cuda, CudaClock, CudaMemoryMeter
from planner.device.kinds import kind_of
from planner.device.meter import MemoryUsage
from planner.executor.measure.recorder import WARM_UP_STEPS, RunRecorder
from planner.model.autocast import weight_cast_cache
from planner.model.chain import chain_of, run_layers
from planner.model.load import Batch, LoadedModel, to_device
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from tests.support.measure import loaded_model
from tests.support.peak_points import peak_points_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

ROOT = Path(__file__).parents[2]
SIZE, WIDTH = 256, 2048
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Empty the device before the next test."""
    yield
    torch.cuda.empty_cache()


def build() -> nn.Module:
    """Return a model that is large compared with the allocator's 512-byte blocks."""
    blocks = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 16))


def loaded() -> LoadedModel:
    """Load the model with momentum: one number of state per parameter."""
    return loaded_model(build, WIDTH, build_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False))


def test_peak_and_end_of_known_allocations() -> None:
    """Blocks have 512 bytes."""
    kept: list[Tensor] = []

    def work() -> None:
        temporary = torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
        kept.append(torch.empty(1 << 19, dtype=torch.uint8, device=CUDA))
        del temporary

    meter = kind_of(CUDA).meter()
    assert isinstance(meter, CudaMemoryMeter)
    assert meter.measure(work) == MemoryUsage((1 << 20) + (1 << 19), 1 << 19)
    assert meter.measure(kept.clear) == MemoryUsage(0, -(1 << 19))


def test_the_clock_waits_for_the_device() -> None:
    clock = kind_of(CUDA).clock(1)
    assert isinstance(clock, CudaClock)
    large, small = torch.randn(4096, 4096, device=CUDA), torch.randn(64, 64, device=CUDA)
    for value in (large, small):
        value @ value  # the first call loads the library
    times = [median_us([clock.time_us(lambda v=v: _discard(v @ v)) for _ in range(9)]) for v in (large, small)]
    assert times[0] > times[1] > 0


def _discard(_value: Any) -> None:
    """Drop the value."""


def test_a_profile_has_positive_times_and_names_the_device() -> None:
    before = torch.cuda.memory_allocated()
    profile = profile_model(loaded(), ProfilerOptions(micro_batch_sizes=(64, SIZE), device="cuda", repeats=4))
    assert (profile.device.kind, profile.device.how) == ("cuda", "measured")
    assert profile.device.name == torch.cuda.get_device_name()
    assert profile.device.memory_bytes > 1 << 30
    assert all(time > 0 for layer in profile.layers for time in (*layer.forward_us, *layer.backward_us))
    assert [layer.output_bytes for layer in profile.layers[:8]] == [(64 * WIDTH * 4, SIZE * WIDTH * 4)] * 8
    assert len({layer.digest for layer in profile.layers}) == 4
    assert torch.cuda.memory_allocated() <= before + (64 << 20)  # a library's workspace may stay


def test_the_reserve_does_not_include_tensors() -> None:
    """Devices report 300 to 700 MB."""
    before = Cuda(CUDA).reserve_bytes()
    ours = torch.ones(2**28, device=CUDA)
    after = Cuda(CUDA).reserve_bytes()
    assert 100e6 < before < 4e9
    assert abs(after - before) < 64 << 20
    del ours


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_composed_memory_is_within_the_promise(recompute: Recompute, micro_batches: int) -> None:
    """Within -1 % and +5 % of `max_memory_allocated` over a real step."""
    offered = loaded()
    profile = profile_model(offered, ProfilerOptions(micro_batch_sizes=(SIZE,), device="cuda", repeats=2))
    model = offered.build().to(CUDA)
    modules = [layer.module for layer in chain_of(model).layers]
    optimizer = offered.build_optimizer(model.parameters())
    batch: Batch = offered.example_batch(SIZE * micro_batches)

    def forward(inputs: Tensor) -> Tensor:
        return offered.loss_fn(run_layers(modules, inputs), None)

    def step() -> None:
        inputs = to_device(batch.inputs, CUDA)
        losses = []
        for piece in inputs.split(SIZE):
            if recompute == "always":
                losses.append(torch.utils.checkpoint.checkpoint(forward, piece, use_reentrant=False))
            else:
                losses.append(forward(piece))
        while losses:
            losses.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    memory = stage_memory(
        costs_at(profile, SIZE),
        0,
        len(modules),
        peak_points_with(micro_batches),
        recompute=recompute,
    )
    truth = memory.parameters + memory.optimizer + memory.buffers + CudaMemoryMeter(CUDA).measure(step).peak_bytes
    assert -0.01 <= memory.total / truth - 1 <= 0.05, (memory, truth)


def test_recorded_times_lie_within_the_step() -> None:
    """Times of the device are converted to the host's clock."""
    recorder = RunRecorder(CUDA)
    for _ in range(WARM_UP_STEPS + 1):
        begin = time.perf_counter_ns()
        with recorder.step():
            recorder.timed("forward", lambda: torch.cuda._sleep(20_000_000))
            recorder.timed("backward", lambda: recorder.timed_recomputation(lambda: torch.cuda._sleep(20_000_000)))
            with recorder.optimizer():
                torch.empty(SIZE, device=CUDA)
        end = time.perf_counter_ns()
    forward, again, backward, optimizer = recorder.steps[-1].spans
    assert [s.kind for s in (forward, again, backward, optimizer)] == ["forward", "recompute", "backward", "optimizer"]
    slack_ns = 50_000  # between the host's clock and the device's
    assert begin - slack_ns <= forward.start_ns < forward.end_ns <= backward.start_ns <= again.start_ns
    assert again.end_ns <= backward.end_ns <= optimizer.start_ns <= optimizer.end_ns <= end + slack_ns
    assert forward.end_ns - forward.start_ns > 1_000_000
    assert recorder.peak.outside_bytes > 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_keeps_cached_copies_of_weights(*, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards of a GPU run on a thread of their own, on which recomputation is the outermost autocast context."""
    cleared: list[bool] = []
    layer, value = nn.Linear(8, 8, device=CUDA), torch.randn(4, 8, device=CUDA, requires_grad=True)
    with weight_cast_cache("bf16-mixed", CUDA):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = torch.utils.checkpoint.checkpoint(layer, value, use_reentrant=use_reentrant)
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
        result.float().sum().backward()
        assert layer.weight.grad is not None
        assert not cleared
    assert cleared


def test_the_equivalence_check_runs_beside_cuda() -> None:
    """The check forks processes, which this process could not after it has used CUDA."""
    torch.zeros(1, device=CUDA)
    profile = planner.profile(ROOT / "sample_models" / "mlp.py", batch_sizes=(2,), device="cuda", time_budget="0s")
    assert profile.proof is not None
    assert profile.proof.cuts == len(profile.layers) - 1
