"""Tests of state that a model keeps between forwards: trained as in a plain loop, or refused."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

from planner.core.errors import ModelError
from planner.core.values.plan import Recompute
from planner.executor.build.building import StageRange, build_stages, build_structure
from planner.executor.run.replay import LayerState
from planner.executor.run.shapes import chain_shapes
from planner.executor.run.stage_module import StageModule
from planner.model.chain import chain_of
from planner.profile.profiler import keep_model_unchanged
from tests.support.measure import loaded_model

WIDTH, SEED, MICRO_BATCHES = 4, 3, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    """Layer that passes its input through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value))


class Scaled(Block):
    """Layer with a running scale, which is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value)
        self.scale = 0.9 * self.scale + 0.1 * value.detach().abs().mean()
        return value / self.scale


class Remembers(Block):
    """Layer that adds what it returned for the previous micro-batch, as truncated backpropagation does."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value if self.last is None else value + self.last.detach())
        self.last = value
        return value


class Counts(nn.Module):
    """Counter in a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        return value * (1 + 0.1 * self.count)


class Blocks(nn.Module):
    """Blocks in a forward of their own."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value


class CountsAtTheTop(Blocks):
    """Model whose own code counts, in a number and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        return super().forward(value * (1 + 0.1 * self.count + 0.1 * self.calls))


class Centred(Blocks):
    """Model whose own code reads a mean first and assigns it last."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
        return value


class CentredBuffer(Blocks):
    """Like `Centred`, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
        return value


class Moves(Block):
    """Layer that changes a tensor in place, which other layers may share."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        with torch.no_grad():
            self.shared.lerp_(value.mean(0), 0.1)
        return value + self.shared.clone()


def sharing(*, trained: bool, at: tuple[int, int]) -> nn.Sequential:
    """Return four layers, of which two share a parameter that both change in place."""
    shared = nn.Parameter(torch.zeros(WIDTH), requires_grad=trained)
    return nn.Sequential(*(Moves(shared) if n in at else Block() for n in range(4)))


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "running scale": lambda: Blocks(Scaled),
    "truncated backpropagation": lambda: Blocks(Remembers),
    "truncated backpropagation in a Sequential": lambda: nn.Sequential(*(Remembers() for _ in range(4))),
    "counter in a block": lambda: Blocks(lambda: nn.Sequential(Block(), Counts())),
    "counter at the top": CountsAtTheTop,
    "neighbors share": lambda: sharing(trained=False, at=(0, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always", "layers"])
@pytest.mark.parametrize("name", STATEFUL)
def test_gradients_with_state_in_one_stage_equal_a_plain_loop(name: str, recompute: Recompute) -> None:
    check_gradients_are_finite(name, recompute)


@pytest.mark.parametrize("name", ["counter in a block", "counter at the top"])
def test_stages_of_one_process_have_separate_counters(name: str) -> None:
    """Code between modules runs in each stage, and counts a micro-batch once in each."""
    check_gradients_are_finite(name, "never", together=True)


def check_gradients_are_finite(name: str, recompute: Recompute, *, together: bool = False) -> None:
    """Compare gradients of stages with those of the plain loop."""
    torch.manual_seed(SEED)
    whole = STATEFUL[name]()
    inputs = torch.randn(MICRO_BATCHES, 2, WIDTH)
    for value in inputs:
        whole(value).sum().backward()
    for stage in stages_of(STATEFUL[name], inputs, recompute, together=together):
        for parameter_name, parameter in stage.named_parameters():
            expected = whole.get_parameter(parameter_name).grad
            if expected is not None:
                torch.testing.assert_close(parameter.grad, expected, msg=parameter_name)


def stages_of(
    build: Callable[[], nn.Module], inputs: Tensor, recompute: Recompute, *, together: bool
) -> list[StageModule]:
    """Return two stages after all forwards and backwards; built `together` as for one process."""
    loaded = loaded_model(build, lambda size: torch.ones(size, WIDTH), loss_fn=lambda output, _: output.sum())
    chain = build_structure(loaded)
    shapes = chain_shapes(chain, torch.ones(2, WIDTH))
    cuts = list(accumulate((2, len(chain.layers) - 2), initial=0))
    spans = [StageRange(first, end, recompute == "layers") for first, end in pairwise(cuts)]
    groups = [spans] if together else [[span] for span in spans]
    built = [layers for group in groups for layers in build_stages(loaded, chain, group, seed=SEED, device=CPU)]
    stages = []
    for (first, end, _), layers in zip(spans, built, strict=True):
        is_last, numbers = end == cuts[-1], range(len(layers) if recompute == "layers" else 0)
        stage = StageModule(
            layers,
            received=shapes.boundaries[first],
            recompute=recompute,
            micro_batches=MICRO_BATCHES,
            loss_fn=loaded.loss_fn if is_last else None,
            copies_input=False,
            carries=() if is_last else [True],
            recomputed={n: shapes.recomputed_layer(first + n, end) for n in numbers},
            first_layer=first,
        )
        stage.targets = [None] * MICRO_BATCHES
        stages.append(stage)
    losses = []
    for micro_batch, value in enumerate(inputs):
        passed: Any = (value,)
        for stage in stages:
            stage.micro_batch = micro_batch
            passed = stage(*passed)
        losses.append(passed)
    for loss in losses:
        loss.backward()
    return stages


SEPARATED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "assigned attribute": (Centred, "mean"),
    "assigned buffer": (CentredBuffer, "mean"),
    "trained parameter": (lambda: sharing(trained=True, at=(0, 3)), "0.shared"),
    "frozen parameter": (lambda: sharing(trained=False, at=(0, 3)), "0.shared"),
}


@pytest.mark.parametrize("name", SEPARATED)
def test_state_that_every_cut_would_separate_is_refused(name: str) -> None:
    """The message names the state."""
    build, state = SEPARATED[name]
    with pytest.raises(ModelError, match=f'cannot be cut.*forward changes "{state}"'):
        chain_of(build(), lambda size: torch.randn(size, WIDTH))


def test_layers_of_a_sequential_that_share_state_are_one_layer() -> None:
    model = sharing(trained=False, at=(0, 1))
    assert [len(names) for names in chain_of(model, lambda size: torch.randn(size, WIDTH)).outline.modules] == [2, 1, 1]


def test_finding_layers_does_not_change_counters() -> None:
    """Otherwise a count over two batch sizes would be taken for a number that grows with the batch."""
    model = CountsAtTheTop()
    chain_of(model, lambda size: torch.randn(size, WIDTH))
    assert (model.count, float(model.calls)) == (0, 0.0)


def test_sparse_tensors_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(ModelError, match=r'"1\.adjacency" is a sparse tensor') as refused:
        chain_of(model)
    assert "to_dense" in str(refused.value.hint)


def quantized() -> nn.Module:
    """Return a model for quantization-aware training."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.qconfig = get_default_qat_qconfig("fbgemm")
    return prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore")
def test_recomputation_of_resized_buffers_is_refused() -> None:
    """Observers resize their buffers in the first forward."""
    model = quantized()
    run = LayerState([("0", model)]).with_same_state(model)
    with pytest.raises(ModelError, match="a layer resizes one of its buffers"):
        run(torch.randn(2, WIDTH))


@pytest.mark.filterwarnings("ignore")
def test_measuring_restores_resized_buffers() -> None:
    model = quantized()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with keep_model_unchanged(model):
        model(torch.randn(2, WIDTH))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_measuring_leaves_expanded_buffers_alone() -> None:
    """Torch refuses to write into them."""
    model = nn.Linear(WIDTH, WIDTH)
    model.register_buffer("bias_of_all", torch.ones(1).expand(WIDTH))
    with keep_model_unchanged(model):
        model(torch.randn(2, WIDTH))
    assert torch.equal(model.bias_of_all, torch.ones(WIDTH))
