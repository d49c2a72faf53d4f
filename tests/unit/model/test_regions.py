"""Checkpointed functions, and autograd functions that call modules, are not cut in two."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from planner.core.errors import ModelError
from planner.model.chain import chain_of
from tests.support.cutting import compare, compare_all_ways
from tests.support.measure import loaded_model, profile_of_model
from tests.unit.model.test_stages import Block
from tests.zoo.real_models import REAL_MODELS, loss_of

WIDTH = 8
REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


class Checkpointed(nn.Module):
    """Runs its blocks by `run_block`."""

    def __init__(self, run_block: Callable[[nn.Module, Tensor], Tensor], number: int = 4) -> None:
        super().__init__()
        self.run_block = run_block
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value)
        for block in self.blocks:
            value = self.run_block(block, value)
        return value


class CheckpointsItself(nn.Module):
    """Checkpoints a function that calls a module."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, value: Tensor) -> Tensor:
        return checkpoint(self._both, value, use_reentrant=self.reentrant)

    def _both(self, value: Tensor) -> Tensor:
        return torch.sin(self.block(value))


def values(batch: int) -> Tensor:
    return torch.randn(batch, WIDTH)


@pytest.mark.slow
@REENTRANT
def test_gradients_cross_cuts_between_checkpointed_blocks(*, reentrant: bool) -> None:
    """No cut goes through a checkpointed block."""
    model = Checkpointed(lambda block, value: checkpoint(block, value, use_reentrant=reentrant))
    assert compare_all_ways(model, values, num_stages=5).chain.names == (
        "stem",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
    )


def test_modules_inside_a_checkpointed_block_are_not_reported_as_missing_cuts() -> None:
    """The layers are the blocks, which are as small as they should be."""
    model = Checkpointed(lambda block, value: checkpoint(block, value, use_reentrant=False))
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()) for _ in range(4))
    outline = chain_of(model, values).outline
    assert outline.names == ("stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert not outline.note_on_missing_cuts


@REENTRANT
def test_gradients_cross_cuts_between_blocks_that_checkpoint_themselves(*, reentrant: bool) -> None:
    model = Checkpointed(lambda block, value: block(value))
    model.blocks = nn.ModuleList(CheckpointsItself(reentrant=reentrant) for _ in range(3))
    assert compare_all_ways(model, values, num_stages=4).chain.names == ("stem", "blocks.0", "blocks.1", "blocks.2")


@REENTRANT
def test_cuts_lie_between_checkpointed_segments_of_several_blocks(*, reentrant: bool) -> None:
    class Segments(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            return checkpoint_sequential(list(self.blocks), 2, self.stem(value), use_reentrant=reentrant)

    assert len(compare_all_ways(Segments(lambda block, value: block(value)), values, num_stages=4).chain.names) == 4


@pytest.mark.slow
@REENTRANT
def test_no_cut_follows_a_checkpoint_with_code_after_its_module(*, reentrant: bool) -> None:
    """A later stage would recompute that code."""
    model = Checkpointed(
        lambda block, value: checkpoint(lambda given: torch.sin(block(given)), value, use_reentrant=reentrant)
    )
    assert compare_all_ways(model, values, num_stages=2).chain.names == ("stem", "blocks.0")


def test_a_checkpoint_around_the_whole_model_is_refused_with_its_reason() -> None:
    class Whole(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            return checkpoint(super().forward, value, use_reentrant=True)

    with pytest.raises(ModelError, match=r": the cut is inside a function that `torch.utils.checkpoint` runs again"):
        chain_of(Whole(lambda block, value: block(value)), values)


class RecomputingFunction(torch.autograd.Function):
    """Checkpointing as libraries wrote it before torch had it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], value: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(value)
        return run(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(value)
        parameters = list(ctx.run.parameters())
        return (None, *torch.autograd.grad(result, [value, *parameters], gradient))


@pytest.mark.slow
def test_results_inside_an_autograd_function_are_not_cut() -> None:
    """They have no graph. The refusal names `use_reentrant=False`."""
    apply = RecomputingFunction.apply
    model = Checkpointed(lambda block, value: apply(block, value, *block.parameters()))
    with torch.random.fork_rng():
        assert compare_all_ways(model, values, num_stages=2).chain.names == ("stem", "blocks.0")

    class Without(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = self.run_block(block, value)
            return value

    blocks = Without(lambda block, value: apply(block, value, *block.parameters()))
    with pytest.raises(ModelError, match=r"function RecomputingFunction calls modules.*`use_reentrant=False`"):
        chain_of(blocks, values)


class Doubled(torch.autograd.Function):
    """An autograd function that calls no module."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return 2 * value

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


@pytest.mark.parametrize("function", [Doubled.apply, lambda x: checkpoint(torch.sin, x, use_reentrant=False)])
def test_functions_without_modules_run_again_after_each_cut(function: Callable[[Tensor], Tensor]) -> None:
    """Every block reads the result; each stage computes it, and the gradient comes back."""

    class Read(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            value = self.stem(value)
            read = function(value)
            for block in self.blocks:
                value = block(value) * read
            return value

    assert compare_all_ways(Read(lambda block, value: block(value)), values, num_stages=5).chain.names == (
        "stem",
        *(f"blocks.{n}" for n in range(4)),
    )


@pytest.mark.slow
def test_masks_made_under_vmap_are_computed_again_after_each_cut() -> None:
    """Attention masks of transformers 4 use an autograd function of torch."""

    class Masked(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            places, kept = torch.arange(WIDTH), torch.arange(WIDTH) % 3 > 0
            with TransformGetItemToIndex():
                seen = torch.vmap(torch.vmap(lambda q, k: (k <= q) & kept[k], (None, 0)), (0, None))(places, places)
            value = self.stem(value)
            for block in self.blocks:
                value = block(value) @ seen.to(value.dtype)
            return value

    model = Masked(lambda block, value: block(value))
    assert compare_all_ways(model, values, num_stages=5).chain.names == ("stem", *(f"blocks.{n}" for n in range(4)))


def test_results_of_a_module_with_an_autograd_function_cross_cuts() -> None:
    """They have a graph, unlike results inside the function."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, value: Tensor) -> Tensor:
            return RecomputingFunction.apply(self.block, value, *self.block.parameters())

    model = Checkpointed(lambda block, value: block(value))
    model.blocks = nn.ModuleList(Around() for _ in range(3))
    assert compare_all_ways(model, values, num_stages=4).chain.names == ("stem", "blocks.0", "blocks.1", "blocks.2")


@REENTRANT
def test_children_of_a_sequential_may_checkpoint_themselves(*, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(CheckpointsItself(reentrant=reentrant) for _ in range(3)))
    value = values(3)
    loss_of(model(value)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    edges: list[tuple[Tensor, Tensor]] = []
    for layer in chain_of(model).layers:
        sent, value = value, value.detach().requires_grad_(value.requires_grad)
        edges.append((sent, value))
        value = layer.module(value)
    loss_of(value).backward()
    for sent, leaf in reversed(edges[1:]):
        sent.backward(leaf.grad)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    assert all(parameter.grad is not None for parameter in model.parameters())


@REENTRANT
@pytest.mark.parametrize("in_sequence", [True, False])
def test_saved_bytes_of_a_checkpointed_layer_are_its_input_and_random_state(*, reentrant, in_sequence):
    state_bytes = torch.get_rng_state().nbytes
    if in_sequence:
        model: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            CheckpointsItself(reentrant=reentrant),
            CheckpointsItself(reentrant=reentrant),
            nn.Linear(WIDTH, 1),
        )
    else:
        model = Checkpointed(lambda block, value: checkpoint(block, value, use_reentrant=reentrant))
    profile = profile_of_model(loaded_model(model, WIDTH), sizes=(64,))
    layers = profile.layers[1:3]
    assert all(layer.backward_us[0] > 0 for layer in layers)
    assert [layer.saved_bytes[0] for layer in layers] == [64 * WIDTH * 4 + state_bytes] * 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run the test with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@REENTRANT
@pytest.mark.usefixtures("one_thread")
def test_gradient_checkpointing_of_transformers_keeps_its_layers(*, reentrant: bool) -> None:
    pytest.importorskip("transformers")
    real = REAL_MODELS["GPT-2"]
    plain, model = real.build(), real.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.config.use_cache = False
    result = compare(model, real.inputs, loss_of, num_stages=4)
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5
    assert result.chain.names == chain_of(plain, real.inputs).names


class Potential(nn.Module):
    """Returns the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        value = positions
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return -torch.autograd.grad(value.square().sum(), positions, create_graph=True)[0]


def test_a_model_that_differentiates_its_own_code_is_refused() -> None:
    """As a child of a Sequential it is one layer."""
    with pytest.raises(ModelError, match=r"`forward` calls `torch\.autograd\.grad`") as refused:
        chain_of(Potential(), values)
    assert "nn.Sequential" in refused.value.hint
    assert len(chain_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Potential())).names) == 2


class Mapped(nn.Module):
    """Maps functions and modules over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mapped = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = torch.vmap(lambda sample: sample / (1 + sample.norm()))(block(value))
        return value + torch.vmap(self.mapped)(value)


def test_modules_called_within_vmap_are_part_of_the_code_around_them() -> None:
    torch.manual_seed(0)
    result = compare(Mapped(), values, torch.Tensor.sum)
    assert len(result.chain.names) == 5
    assert result.gradient_error < 1e-5
