"""Optimizer state and step peaks measured layer by layer, compared with the allocator's in a real step."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.core.values.profile import Profile
from planner.device.clock import CpuClock
from planner.device.meter import CpuMemoryMeter
from planner.model.optimizers import WholeModelOptimizer
from planner.profile.optimizer import has_additive_peaks, measure_optimizer, optimizer_boundary_peaks
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from tests.support.measure import loaded_model, profile_of_model
from tests.support.peak_points import peak_points_with

Build = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "adafactor foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
}
WIDTHS = (128, 256, 160, 384, 64)


def model() -> nn.Sequential:
    """Return layers of different sizes; the batch is small, so that the optimizer step is the peak."""
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def model_without_biases() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [model, model_without_biases])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_peak_of_an_optimizer_step(name: str, build: Callable[[], nn.Sequential]) -> None:
    """Within -1 % and +5 %, also if two large parameters are consecutive."""
    torch.set_num_threads(1)
    loaded = loaded_model(build, WIDTHS[0], build_optimizer=OPTIMIZERS[name])
    costs = costs_at(profile_of_model(loaded), 2)
    memory = stage_memory(costs, 0, len(WIDTHS) - 1, peak_points_with(1), recompute="never")
    trained = build()
    optimizer = loaded.build_optimizer(trained.parameters())
    batch = loaded.example_batch(2).inputs

    def step() -> None:
        loaded.loss_fn(trained(batch), None).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    fixed = sum(t.untyped_storage().nbytes() for t in (*trained.parameters(), *state))
    truth = fixed + batch.nbytes + CpuMemoryMeter().measure(step).peak_bytes
    assert -0.01 <= memory.total / truth - 1 <= 0.05, (memory, truth)


class WithUnusedHead(nn.Module):
    """Computes a head that is not used; with `asks`, only if values say so."""

    def __init__(self, *, asks: bool = False) -> None:
        super().__init__()
        self.used, self.head, self.asks = nn.Linear(16, 16), nn.Linear(16, 500), asks

    def forward(self, value: Tensor) -> Tensor:
        if not self.asks or value.sum().item() > 1e9:
            self.head(value)
        return self.used(value)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adagrad", "adafactor"])
def test_optimizer_state_of_a_parameter_without_gradient(name: str) -> None:
    """Usually none, but Adagrad allocates all of its state at first."""
    loaded = loaded_model(lambda: nn.Sequential(WithUnusedHead(), nn.ReLU()), 16, build_optimizer=OPTIMIZERS[name])
    trained = WithUnusedHead()
    optimizer = loaded.build_optimizer(trained.parameters())
    trained(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    profile = profile_of_model(loaded)
    assert profile.layers[0].optimizer_bytes == sum(t.untyped_storage().nbytes() for t in state)


class Both(torch.optim.Optimizer):
    """Optimizer that leaves its parameters, and their state, to two others."""

    def __init__(self, parameters: Iterable[Tensor], state: dict[Tensor, Any] | None = None) -> None:
        every = list(parameters)
        super().__init__(every, {})
        self.parts = [torch.optim.Adam([p], lr=0.1, foreach=False) for p in every]
        if state is not None:
            self.state: Any = state

    def step(self, closure: Any = None) -> None:
        """Step with all of them."""
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("build", [Both, lambda parameters: Both(parameters, state={})], ids=["", "plain dict"])
def test_state_in_optimizers_of_an_optimizer_is_counted(build: Build) -> None:
    def profile_with(optimizer: Build) -> Profile:
        return profile_of_model(
            loaded_model(lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()), 16, build_optimizer=optimizer)
        )

    assert profile_with(build).layers[0].optimizer_bytes == profile_with(OPTIMIZERS["adam"]).layers[0].optimizer_bytes


def test_unused_parameters_of_a_value_dependent_layer_have_state() -> None:
    """Other values would use its head. An earlier layer's unused head does not count."""
    loaded = loaded_model(
        lambda: nn.Sequential(WithUnusedHead(), WithUnusedHead(asks=True)), 16, build_optimizer=OPTIMIZERS["adam"]
    )
    first, asking = profile_of_model(loaded).layers
    assert first.idle_bytes == first.parameter_bytes - 4 * 16 * 17 > 0
    assert asking.idle_bytes == 0
    assert asking.optimizer_bytes >= 2 * asking.parameter_bytes


class Heads(nn.Module):
    """Equal blocks, each with an unused head; with `shared`, the last layer uses the head of block 2."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithUnusedHead() for _ in range(4))
        self.last = nn.Linear(16, 500)
        if shared:
            self.last.weight = self.blocks[2].head.weight

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return self.last(value)


def profile_of_heads(device: str, *, shared: bool) -> Profile:
    options = ProfilerOptions(micro_batch_sizes=(2,), repeats=2, time_budget_s=0.0, device=device)
    loaded = loaded_model(partial(Heads, shared=shared), 16, build_optimizer=OPTIMIZERS["adam"])
    profile = profile_model(loaded, options)
    assert profile.layers[1].digest == profile.layers[2].digest
    return profile


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "estimate:a100-80gb"])
def test_a_parameter_used_by_another_layer_has_state(device: str) -> None:
    """Parameters of equal layers have other names."""
    alone, sharing = (profile_of_heads(device, shared=shared).layers[2] for shared in (False, True))
    head_bytes = 4 * 16 * 500
    assert 2 * head_bytes <= sharing.optimizer_bytes - alone.optimizer_bytes < 2.1 * head_bytes


@pytest.mark.parametrize("device", ["cpu", "estimate:a100-80gb"])
def test_boundary_peaks_skip_parameters_without_gradient(device: str) -> None:
    """Adam skips all unused heads."""
    _, *peaks = [layer.optimizer_boundary_peak_bytes for layer in profile_of_heads(device, shared=False).layers[:4]]
    assert peaks == peaks[:1] * 3


def test_boundary_peaks_follow_the_order_of_steps() -> None:
    """Adam keeps a temporary until the next parameter of its group, which may be in another layer."""
    layers = [[nn.Parameter(torch.zeros(1000))] for _ in range(3)]

    def groups(order: tuple[int, ...], apart: tuple[int, ...]) -> WholeModelOptimizer:
        def build(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
            given = list(parameters)
            return torch.optim.Adam([{"params": [given[n] for n in order]}, {"params": [given[n] for n in apart]}])

        return WholeModelOptimizer(build, [p for layer in layers for p in layer])

    def peaks(order: tuple[int, ...], apart: tuple[int, ...] = ()) -> list[int]:
        found = optimizer_boundary_peaks(
            layers, groups(order, apart), device=torch.device("cpu"), meter=CpuMemoryMeter()
        )
        return [round(peak / 4000) for peak in found]

    assert peaks((0, 1, 2)) == [0, 3, 3]
    assert peaks((0, 1), (2,)) == [0, 3, 0]
    assert peaks((2, 1, 0)) == [0, 3, 3]


@pytest.mark.parametrize("foreach", [False, True])
def test_peaks_add_only_if_the_optimizer_updates_several_parameters_at_once(*, foreach: bool) -> None:
    """The optimizer updates small parameters between the large ones, in another order than the layer lists them."""
    layer = nn.Module()
    for name, size in {"large": 1000, "small": 1, "bias": 1, "other": 1000}.items():
        layer.register_parameter(name, nn.Parameter(torch.zeros(size)))
    in_model = [layer.get_parameter(name) for name in ("large", "small", "other", "bias")]
    whole = WholeModelOptimizer(partial(torch.optim.Adam, foreach=foreach), in_model)
    assert has_additive_peaks(layer, whole, meter=CpuMemoryMeter()) is foreach


def test_large_parameters_are_measured_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("planner.profile.optimizer"), "_MOST_NUMBERS", 128 * 40)
    layer = nn.Sequential(nn.Linear(128, 80, bias=False), nn.Linear(80, 8), nn.Linear(128, 40))
    whole = WholeModelOptimizer(torch.optim.Adam, layer.parameters())
    cost = measure_optimizer(layer, whole, meter=CpuMemoryMeter(), clock=CpuClock(1), repeats=1)
    assert cost.peak_bytes == pytest.approx(2 * 128 * 80 * 4, rel=0.02)
