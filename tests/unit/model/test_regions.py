"""What backward runs as a whole (checkpointed functions, autograd functions that call modules) is not cut in two."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from planner.core.errors import ModelError
from planner.model.chain import chain_of
from tests.support.cutting import Compared, compare
from tests.support.measure import loaded_model, profile_of_model
from tests.zoo.real_models import REAL_MODELS, loss_of

WIDTH = 8
REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


class Block(nn.Module):
    """It keeps its input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        """(b, WIDTH) to (b, WIDTH)."""
        return value + self.two(torch.tanh(self.one(value)))


class Checkpointed(nn.Module):
    """Blocks that `again` runs, one after the other."""

    def __init__(self, again: Callable[[nn.Module, Tensor], Tensor], number: int = 4) -> None:
        super().__init__()
        self.again = again
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, value: Tensor) -> Tensor:
        """(b, WIDTH) to (b, WIDTH)."""
        value = self.stem(value)
        for block in self.blocks:
            value = self.again(block, value)
        return value


class Inside(nn.Module):
    """A block that computes itself again, and something beside the module in it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, value: Tensor) -> Tensor:
        """(b, WIDTH) to (b, WIDTH)."""
        result: Tensor = checkpoint(self._both, value, use_reentrant=self.reentrant)
        return result

    def _both(self, value: Tensor) -> Tensor:
        return torch.sin(self.block(value))


def values(batch: int) -> Tensor:
    """Inputs of most models here."""
    return torch.randn(batch, WIDTH)


def compared(model: nn.Module, num_stages: int = 5) -> Compared:
    """Every way of cutting and running it gives the same numbers."""
    for granularity in ("fine", "coarse"):
        for recompute in (True, False):
            result = compare(
                model, values, loss_of, granularity=granularity, recompute=recompute, num_stages=num_stages
            )
            assert result.loss_error < 1e-6
            assert result.gradient_error < 1e-5
    return result


@REENTRANT
def test_gradients_cross_cuts_between_checkpointed_blocks(*, reentrant: bool) -> None:
    """Each block is a checkpoint as a whole; no cut goes through one, however finely the model is cut."""
    model = Checkpointed(lambda block, value: checkpoint(block, value, use_reentrant=reentrant))
    assert compared(model).chain.names == ("stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3")


@REENTRANT
def test_gradients_cross_cuts_between_blocks_that_checkpoint_themselves(*, reentrant: bool) -> None:
    """Where the checkpoint lies in a module's own forward it may compute what it likes."""
    model = Checkpointed(lambda block, value: block(value))
    model.blocks = nn.ModuleList(Inside(reentrant=reentrant) for _ in range(3))
    assert compared(model, 4).chain.names == ("stem", "blocks.0", "blocks.1", "blocks.2")


@REENTRANT
def test_a_checkpoint_over_several_blocks_is_not_cut(*, reentrant: bool) -> None:
    """The cuts lie between the segments; what they pass on is what their last module returned."""

    class Segments(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = checkpoint_sequential(list(self.blocks), 2, self.stem(value), use_reentrant=reentrant)
            return result

    assert len(compared(Segments(lambda block, value: block(value)), 4).chain.names) == 4


@REENTRANT
def test_code_of_a_checkpoint_behind_its_last_module_makes_no_cut_wrong(*, reentrant: bool) -> None:
    """A stage behind would run that code again in backward, on modules that are not stubs then."""
    model = Checkpointed(
        lambda block, value: checkpoint(lambda given: torch.sin(block(given)), value, use_reentrant=reentrant)
    )
    assert compared(model, 2).chain.names == ("stem", "blocks.0")


def test_a_single_checkpoint_around_everything_says_why_there_is_no_cut() -> None:
    """Rather than that there is only one layer."""

    class Whole(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, value, use_reentrant=True)
            return result

    with pytest.raises(ModelError, match=r"a function that `torch.utils.checkpoint` runs again as a whole"):
        chain_of(Whole(lambda block, value: block(value)), values)


class Own(torch.autograd.Function):
    """Checkpointing as libraries wrote it before torch had it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], value: Tensor, *_parameters: Tensor) -> Tensor:
        """Without a graph."""
        ctx.run = run
        ctx.save_for_backward(value)
        return run(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Forward and backward."""
        value = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(value)
        parameters = list(ctx.run.parameters())
        return (None, *torch.autograd.grad(result, [value, *parameters], gradient))


def test_results_within_an_autograd_function_cross_no_cut() -> None:
    """They have no graph; the remedy is told."""
    apply = Own.apply
    model = Checkpointed(lambda block, value: apply(block, value, *block.parameters()))
    with torch.random.fork_rng():
        assert compared(model, 2).chain.names == ("stem", "blocks.0")

    class Without(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = self.again(block, value)
            return value

    blocks = Without(lambda block, value: apply(block, value, *block.parameters()))
    with pytest.raises(ModelError, match=r"function Own calls modules.*`use_reentrant=False`"):
        chain_of(blocks, values)


class Doubled(torch.autograd.Function):
    """What is written as a function for the sake of its backward; it calls no module."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        """Twice the value."""
        return 2 * value

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        """Its gradient."""
        return 2 * gradient


@pytest.mark.parametrize("function", [Doubled.apply, lambda x: checkpoint(torch.sin, x, use_reentrant=False)])
def test_a_function_that_calls_no_modules_is_run_again_behind_cuts(function: Callable[[Tensor], Tensor]) -> None:
    """What it makes of the input is read by all blocks: each stage makes it for itself, and its gradient comes back."""

    class Read(Checkpointed):
        def forward(self, value: Tensor) -> Tensor:
            value = self.stem(value)
            read = function(value)
            for block in self.blocks:
                value = block(value) * read
            return value

    assert compared(Read(lambda block, value: block(value))).chain.names == ("stem", *(f"blocks.{n}" for n in range(4)))


def test_a_mask_made_under_vmap_is_run_again_behind_cuts() -> None:
    """As transformers 4 makes it of an attention mask: an autograd function of torch's own has a part in it."""

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
    assert compared(model).chain.names == ("stem", *(f"blocks.{n}" for n in range(4)))


def test_results_of_a_module_around_an_autograd_function_do() -> None:
    """It returns what the function did, which has a graph."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = Own.apply(self.block, value, *self.block.parameters())  # type: ignore[no-untyped-call]
            return result

    model = Checkpointed(lambda block, value: block(value))
    model.blocks = nn.ModuleList(Around() for _ in range(3))
    assert compared(model, 4).chain.names == ("stem", "blocks.0", "blocks.1", "blocks.2")


@REENTRANT
def test_children_of_a_sequential_checkpoint_themselves(*, reentrant: bool) -> None:
    """Whole layers, each with leaves for what it receives."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Inside(reentrant=reentrant) for _ in range(3)))
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
def test_what_a_checkpointed_layer_keeps_and_takes_is_measured(*, reentrant: bool, in_sequence: bool) -> None:
    """Backward takes time, and only the layer's input is kept for it, beside the state of the random generator."""
    state_bytes = torch.get_rng_state().nbytes
    if in_sequence:
        model: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Inside(reentrant=reentrant), Inside(reentrant=reentrant), nn.Linear(WIDTH, 1)
        )
    else:
        model = Checkpointed(lambda block, value: checkpoint(block, value, use_reentrant=reentrant))
    profile = profile_of_model(loaded_model(model, WIDTH), sizes=(64,))
    layers = profile.layers[1:3]
    assert all(layer.backward_us[0] > 0 for layer in layers)
    assert [layer.saved_bytes[0] for layer in layers] == [64 * WIDTH * 4 + state_bytes] * 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The numbers of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@REENTRANT
@pytest.mark.usefixtures("one_thread")
def test_gradient_checkpointing_of_transformers_keeps_its_layers(*, reentrant: bool) -> None:
    """As `activation_checkpointing_enable` sets it up, of either kind."""
    pytest.importorskip("transformers")
    real = REAL_MODELS["GPT-2"]
    plain, model = real.build(), real.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.activation_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    model.config.use_cache = False  # type: ignore[union-attr]
    result = compare(model, real.inputs, loss_of, num_stages=4)
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5
    assert result.chain.names == chain_of(plain, real.inputs).names


class Potential(nn.Module):
    """Energy with its gradient, for which the code in between is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, positions: Tensor) -> Tensor:
        """(b, WIDTH) to the same: minus the gradient of the energy."""
        positions = positions.detach().requires_grad_()
        value = positions
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return -torch.autograd.grad(value.square().sum(), positions, create_graph=True)[0]


def test_a_model_that_differentiates_its_own_code_is_refused() -> None:
    """As a child of a Sequential it is a layer like any other."""
    with pytest.raises(ModelError, match=r"`forward` calls `torch\.autograd\.grad`") as refused:
        chain_of(Potential(), values)
    assert "nn.Sequential" in refused.value.hint
    assert len(chain_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Potential())).names) == 2


class Mapped(nn.Module):
    """Blocks whose code maps functions and modules over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mapped = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        """(b, WIDTH) to the same."""
        for block in self.blocks:
            value = torch.vmap(lambda sample: sample / (1 + sample.norm()))(block(value))
        return value + torch.vmap(self.mapped)(value)


def test_code_that_vmap_transforms_is_cut_around() -> None:
    """A module that is called within `torch.vmap` is part of the code around it."""
    torch.manual_seed(0)
    result = compare(Mapped(), values, torch.Tensor.sum)
    assert len(result.chain.names) == 5
    assert result.gradient_error < 1e-5
