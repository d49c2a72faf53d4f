"""Peak memory composed from records of single layers, compared with the allocator's in a real GPipe step."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.core.values.plan import Recompute
from planner.device.meter import CpuMemoryMeter
from planner.model.chain import Layer, chain_of, run_layers
from planner.model.load import LoadedModel, load_model
from tests.support.measure import profile_of_model
from tests.support.peak_points import peak_points_with

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
SIZE = 4

# Large enough that a constant of 5 kB per recomputed micro-batch, the random state that it keeps, is no percent.
MODELS: dict[str, dict[str, str]] = {
    "mlp": {"depth": "5", "width": "256"},
    "transformer_lm": {
        "layers": "2",
        "width": "64",
        "feed_forward": "256",
        "heads": "4",
        "vocabulary": "256",
        "tokens": "64",
    },
    "amoebanet_d": {"num_layers": "3", "num_filters": "16"},
}
LOWEST, HIGHEST = -0.01, 0.05


@cache
def prepared(name: str) -> tuple[LoadedModel, ChainCosts]:
    """Return the model and its costs at SIZE samples per micro-batch."""
    torch.set_num_threads(1)
    loaded = load_model(str(SAMPLE_MODELS / f"{name}.py"), settings=MODELS[name])
    return loaded, costs_at(profile_of_model(loaded, sizes=(SIZE,)), SIZE)


def measured_peak_bytes(step: Callable[[], None]) -> int:
    """Return the peak of a step above the memory before it. Two steps run before, for what is allocated once."""
    step()
    step()
    usage = CpuMemoryMeter().measure(step)
    assert usage.end_bytes == 0
    return usage.peak_bytes


def predicted_bytes(
    costs: ChainCosts, first: int, end: int, micro_batches: int, recompute: Recompute
) -> tuple[int, int]:
    """Return the stage's total, and the part of it that stays from step to step."""
    memory = stage_memory(costs, first, end, peak_points_with(micro_batches), recompute=recompute)
    return memory.total, memory.parameters + memory.optimizer + memory.buffers


def recomputes(recompute: Recompute, index: int, micro_batches: int) -> bool:
    """Return True if this micro-batch's activations are recomputed."""
    return recompute == "always" or (recompute == "except-last" and index < micro_batches - 1)


def micro_batches_of(value: Any, count: int) -> list[Any]:
    """Return `value` cut into micro-batches of SIZE samples."""
    return [tree_map_only(Tensor, lambda t, i=i: t[i * SIZE : (i + 1) * SIZE], value) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize("name", MODELS)
def test_peak_of_the_chain_in_one_stage(name: str, recompute: Recompute, micro_batches: int) -> None:
    """The prediction is within -1 % and +5 % of the allocator's peak; without recomputation within 0.1 %."""
    loaded, costs = prepared(name)
    model = loaded.build()
    modules = [layer.module for layer in chain_of(model).layers]
    optimizer = loaded.build_optimizer(model.parameters())

    def forward(inputs: Any, targets: Any) -> Tensor:
        return loaded.loss_fn(run_layers(modules, inputs), targets)

    def step() -> None:
        batch = loaded.example_batch(SIZE * micro_batches)
        cut = zip(
            micro_batches_of(batch.inputs, micro_batches), micro_batches_of(batch.targets, micro_batches), strict=True
        )
        losses = [
            checkpoint(forward, inputs, targets, use_reentrant=False)
            if recomputes(recompute, i, micro_batches)
            else forward(inputs, targets)
            for i, (inputs, targets) in enumerate(cut)
        ]
        while losses:
            losses.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()

    total, constant = predicted_bytes(costs, 0, len(modules), micro_batches, recompute)
    truth = constant + measured_peak_bytes(step)
    assert LOWEST <= total / truth - 1 <= HIGHEST, (total, truth)
    if recompute == "never":
        assert abs(total / truth - 1) < 0.001, (total, truth)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(("name", "first", "end"), [("mlp", 2, 6), ("transformer_lm", 1, 3), ("amoebanet_d", 2, 6)])
def test_peak_of_a_middle_stage(name: str, *, first: int, end: int, recompute: Recompute, micro_batches: int) -> None:
    """The engine also holds received inputs, outputs and their gradients, and the last sent input gradient."""
    loaded, costs = prepared(name)
    model = loaded.build()
    layers = chain_of(model).layers
    boundary = _boundary(layers[:first], loaded)
    modules = [layer.module for layer in layers[first:end]]
    optimizer = loaded.build_optimizer([p for module in modules for p in module.parameters()])

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        value = run_layers(modules, tree_unflatten([next(given) for _ in boundary.tensors], boundary.spec))
        return tuple(leaf.contiguous() for leaf in tree_flatten(value)[0])

    def step() -> None:
        received, sent = [], []
        for i in range(micro_batches):
            inputs = [torch.ones_like(t).requires_grad_() for t in boundary.tensors]
            run = forward
            if recomputes(recompute, i, micro_batches):
                outputs = checkpoint(run, *inputs, use_reentrant=False)
            else:
                outputs = run(*inputs)
            received.append(inputs)
            sent.append(outputs)
            del inputs, outputs
        being_sent: list[Any] = []
        for _ in range(micro_batches):
            inputs, outputs = received.pop(0), sent.pop(0)
            gradients = [torch.ones_like(t) for t in outputs]
            torch.autograd.backward(outputs, gradients)
            being_sent = [t.grad for t in inputs]  # the one before is let go of
            del inputs, outputs, gradients
        being_sent.clear()
        optimizer.step()
        optimizer.zero_grad()

    total, constant = predicted_bytes(costs, first, end, micro_batches, recompute)
    truth = constant + measured_peak_bytes(step)
    assert LOWEST <= total / truth - 1 <= HIGHEST, (total, truth)


class _Boundary:
    def __init__(self, value: Any) -> None:
        leaves, self.spec = tree_flatten(value)
        self.tensors: list[Tensor] = [leaf.detach() for leaf in leaves]


def _boundary(layers: Sequence[Layer], loaded: LoadedModel) -> _Boundary:
    """Return the output of `layers` for one micro-batch."""
    with torch.no_grad():
        return _Boundary(run_layers([layer.module for layer in layers], loaded.example_batch(SIZE).inputs))


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    prepared.cache_clear()
