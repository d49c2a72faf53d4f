"""Input-gradient (I) and weight-gradient (W) passes add the same to every leaf, bit for bit, as a whole backward."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.executor.run.recompute import RecomputedLayer, run_recomputed
from planner.model.autocast import forward_context
from planner.model.split_backward import DeferredUses, SplitBackward, count_additions

MICRO_BATCHES = 3

Build = Callable[[], nn.Module]
Draw = Callable[[], Tensor]


class TwoModels:
    """Two equal models, one with whole backwards and one with split backwards, and their inputs."""

    def __init__(self, build: Build, draw: Draw, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        self.whole = build()
        torch.manual_seed(0)
        self.split = build()
        self.inputs = [draw() for _ in range(MICRO_BATCHES)]
        self.dtype = dtype

    def autocast(self) -> Any:
        """Return the context of forwards, as in the engine."""
        return forward_context("" if self.dtype is None else "bf16-mixed", torch.device("cpu"))

    def whole_backwards(self) -> list[Tensor]:
        """Return gradients of the inputs after whole backwards."""
        leaves = [leaf(x) for x in self.inputs]
        with torch.autocast("cpu", enabled=False):
            for n, x in enumerate(leaves):
                torch.manual_seed(n)
                with self.autocast():
                    loss = loss_of(self.whole(x))
                loss.backward()
        return [x.grad for x in leaves if x.grad is not None]

    def split_backwards(self, order: tuple[int, ...] = (0, 1, 2)) -> tuple[list[Tensor], int]:
        """Run all F, all I, then W in this order. Return gradients of the inputs and the number of deferred weights."""
        leaves, split = [leaf(x) for x in self.inputs], SplitBackward()
        losses = []
        with torch.autocast("cpu", enabled=False), split.weight_cast_cache():
            for n, x in enumerate(leaves):
                torch.manual_seed(n)
                with self.autocast(), split.splitting():
                    losses.append(loss_of(self.split(x)))
            kept = [split.backward_input([loss], [torch.ones_like(loss)]) for loss in losses]
            numbers = {len(deferred_uses) for deferred_uses in kept}
            for n in order:
                split.backward_weight(kept[n])
        assert kept == [[], [], []]
        (number,) = numbers
        return [x.grad for x in leaves if x.grad is not None], number

    def pairs(self) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        """Yield the gradients of both models by name."""
        for (name, one), (_, other) in zip(self.whole.named_parameters(), self.split.named_parameters(), strict=True):
            yield name, one.grad, other.grad


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def num_deferred(build: Build, draw: Draw, dtype: torch.dtype | None = None) -> int:
    """Return the number of deferred weights; gradients must be equal bit for bit."""
    run = TwoModels(build, draw, dtype)
    expected = run.whole_backwards()
    actual, number = run.split_backwards()
    for name, one, other in run.pairs():
        assert (one is None) == (other is None), name
        assert one is None or other is None or torch.equal(one, other), name
        assert one is None or other is None or one.dtype == other.dtype, name
    assert len(expected) == len(actual)
    assert all(map(torch.equal, expected, actual))
    return number


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Linear(12, 6, bias=False), nn.LayerNorm(6))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3, stride=2, groups=2, padding="valid"), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 4, 3, padding="same", dilation=2), nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1)),
    )


class Functions(nn.Module):
    """Weights used by functions, several times each."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.layer(self.layer(self.rows(numbers)))
        x = self.layer(x @ self.weight)
        rows = torch.addmm(self.bias, x.view(-1, 6), self.weight).mm(self.weight)
        x = functional.linear(rows.view(x.shape), self.weight, self.bias)
        return functional.linear(torch.matmul(x, self.weight), self.rows.weight)


DTYPES = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@DTYPES
@pytest.mark.parametrize(
    ("build", "draw", "number"),
    [
        (perceptron, lambda: torch.randn(4, 6), 2),
        (perceptron, lambda: torch.randn(4, 3, 6), 2),
        (perceptron, lambda: torch.randn(2, 2, 3, 6), 2),
        (perceptron, lambda: torch.randn(4, 6, 3).transpose(1, 2), 2),
        (perceptron, lambda: torch.randn(6, 4).t(), 2),
        (transformer, lambda: torch.randn(2, 5, 16), 8),
        (convolutions, lambda: torch.randn(2, 3, 12, 12), 4),
        (convolutions, lambda: torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last), 4),
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(4, 2, 3)), lambda: torch.randn(2, 3, 9), 2),
        (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ConvTranspose3d(4, 2, 2)), lambda: torch.randn(2, 2, 5, 5, 5), 2),
        (Functions, lambda: torch.randint(10, (2, 5)), 10),
        (lambda: nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 2)), lambda: torch.randn(4, 6), 2),
    ],
    ids=(
        "rows",
        *("three dimensions", "four", "not contiguous", "by columns", "attention"),
        *("images", "channels last", "sequences", "volumes", "functions", "no features"),
    ),
)
def test_split_gradients_equal_those_of_whole_backwards(build, draw, number, dtype):
    assert num_deferred(build, draw, dtype) == number


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 3}, {"padding_idx": -2}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}],
    ids=" ".join,
)
def test_split_gradients_of_embeddings_equal_those_of_whole_backwards(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 6, **options), nn.Linear(6, 6))

    assert num_deferred(build, lambda: torch.randint(10, (3, 4))) == 2


def test_gradients_are_added_in_the_order_of_w_passes() -> None:
    """Gradients of other parameters are added in I."""
    run = TwoModels(perceptron, lambda: torch.randn(4, 6))
    run.inputs = [run.inputs[n] for n in (2, 0, 1)]
    expected = run.whole_backwards()
    run.inputs = [run.inputs[n] for n in (1, 2, 0)]
    actual, _ = run.split_backwards((2, 0, 1))
    assert all(torch.equal(expected[n], x) for n, x in zip((1, 2, 0), actual, strict=True))
    for name, one, other in run.pairs():
        assert torch.equal(one, other) if name.startswith(("0", "2")) else torch.allclose(one, other), name


@pytest.mark.parametrize("re_entrant", [True, False])
@DTYPES
def test_checkpoints_are_recomputed_once_in_i(dtype: torch.dtype | None, *, re_entrant: bool) -> None:
    calls: list[int] = []

    class Checkpoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = perceptron(), perceptron()
            self.dropout = nn.Dropout(0.5)

        def run(self, x: Tensor) -> Tensor:
            calls.append(1)
            return self.dropout(self.two(x))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, self.one(x), use_reentrant=re_entrant)

    assert num_deferred(Checkpoints, lambda: torch.randn(4, 6), dtype) == 4
    assert len(calls) == 2 * 2 * MICRO_BATCHES


@DTYPES
def test_shared_weights_of_recomputed_layers_are_deferred(dtype: torch.dtype | None) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), perceptron()

        def forward(self, x: Tensor) -> Tensor:
            for run in (self.one, self.two, self.one, self.two, self.one):
                x = run_recomputed(run, RecomputedLayer(copies_input=False, carries=(True,)), x)
            return self.one(self.one(x))

    assert num_deferred(Layers, lambda: torch.randn(4, 6), dtype) == 9


def frozen_weight() -> nn.Module:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    return model


def frozen_bias() -> nn.Module:
    model = perceptron()
    model[0].bias.requires_grad_(False)
    return model


def computed_weight() -> nn.Module:
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return nn.Sequential(linear, torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 6))


def compiled(backend: str) -> nn.Module:
    inner = Inner()
    inner.compile(backend=backend, fullgraph=True)
    return nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


class Transformed(nn.Module):
    """Applies transforms of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.func.vmap(self.one)(x)
        x = x + torch.func.jvp(self.two, (x,), (torch.ones_like(x),))[1]
        return self.three(x)


class Overwriting(torch.autograd.Function):
    """Overwrites its result in backward, with a write that version counters do not count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.tanh(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (result,) = ctx.saved_tensors
        slope = 1 - result.square()
        result.data.zero_()
        return gradients[0] * slope


class Overwritten(nn.Module):
    """Two weights whose inputs an autograd function returned, one of them as a view, and a weight before it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = Overwriting.apply(self.one(x))  # type: ignore[no-untyped-call]
        x = Overwriting.apply(self.two(x))  # type: ignore[no-untyped-call]
        return self.three(x.view(2, 2, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile's
@pytest.mark.parametrize(
    ("build", "number"),
    [
        (frozen_weight, 1),
        (frozen_bias, 2),
        (computed_weight, 1),
        (lambda: compiled("eager"), 4),
        (lambda: compiled("aot_eager"), 2),
        (Transformed, 1),
        (Overwritten, 1),
    ],
    ids=["weight frozen", "bias frozen", "computed", "compiled", "compiled by AOT", "transformed", "overwritten"],
)
def test_weights_that_cannot_be_deferred_get_gradients_in_i(build: Build, number: int) -> None:
    torch._dynamo.reset()
    assert num_deferred(build, lambda: torch.randn(4, 6)) == number


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_get_gradients_in_i(register: str) -> None:
    """Hooks are called once per micro-batch, with a gradient."""
    calls: list[Tensor | None] = []

    def build() -> nn.Module:
        model = perceptron()
        getattr(model[0].weight, register)(lambda tensor: calls.append(tensor.detach()))
        return model

    assert num_deferred(build, lambda: torch.randn(4, 6)) == 1
    assert len(calls) == 2 * MICRO_BATCHES
    assert None not in calls


class Penalty(nn.Module):
    """Computes gradients of inputs and weights in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.filter = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        value = self.layers(x).sum() + self.filter(x[:, None]).square().sum()
        first = self.layers[0].weight
        of_x, of_weight = torch.autograd.grad(value, [x, first], create_graph=True)
        (of_bias,) = torch.autograd.grad(self.layers(x).sum(), self.layers[0].bias)
        return value + of_x.square().sum() + of_weight.square().sum() + of_bias.sum()


class Solving(torch.autograd.Function):
    """Differentiates a layer twice in its backward, with respect to its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (first,) = torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)
        (second,) = torch.autograd.grad(ctx.y, ctx.x, first)
        return second, None


class Solver(nn.Module):
    """Has a trainable layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Solving.apply(self.one(x), self.two)


def test_backwards_within_a_forward_are_not_split() -> None:
    """Only the order of sums differs."""
    run = TwoModels(Penalty, lambda: torch.randn(4, 6))
    expected = run.whole_backwards()
    actual, number = run.split_backwards()
    assert number == 3
    assert all(map(torch.allclose, expected, actual))
    for name, one, other in run.pairs():
        assert torch.allclose(one, other, rtol=1e-4), name


def test_backwards_within_a_backward_defer_no_unrequested_weights() -> None:
    assert num_deferred(Solver, lambda: torch.randn(4, 6)) == 1


class Writing(nn.Module):
    """Overwrites a layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.layer(x)
        x.mul_(2)
        return x + y


def test_overwriting_a_saved_input_raises_in_i_and_w() -> None:
    split, x = SplitBackward(), torch.randn(4, 6)
    with split.splitting():
        loss = loss_of(Writing()(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        split.backward_input([loss], [torch.ones(())])
    with split.splitting():
        loss = loss_of(nn.Linear(6, 6)(x))
    deferred_uses = split.backward_input([loss], [torch.ones(())])
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation between .* a Product of shape \[6, 6\]"):
        split.backward_weight(deferred_uses)


def test_i_releases_tensors_that_w_does_not_need() -> None:
    """W needs the inputs and output gradients of layers. Nothing is held after W."""
    held: list[weakref.ref[Tensor]] = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held.append(weakref.ref(x))
            return x

    model = nn.Sequential(nn.Linear(6, 6), Noted(), nn.GELU(), nn.Linear(6, 6), Noted())
    split = SplitBackward()
    with split.splitting():
        output = model(torch.randn(4, 6))
    before_gelu, behind = held
    assert before_gelu() is not None
    gradient = torch.randn(4, 6)
    deferred_uses = split.backward_input([output], [gradient])
    del output
    assert behind() is None
    assert before_gelu() is None
    of_output = weakref.ref(gradient)
    del gradient
    assert of_output() is not None
    assert sum(sizes(deferred_uses)) == 4 * 4 * 4 * 6
    split.backward_weight(deferred_uses)
    assert of_output() is None
    assert deferred_uses == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_a_split_forward_saves_no_more_tensors(dtype: torch.dtype | None) -> None:
    """Nothing within a checkpoint, and of cast inputs only the copy."""
    held: list[weakref.ref[Tensor]] = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.float() * 1
            held.append(weakref.ref(x))
            return x

    inner = nn.Sequential(Noted(), nn.Linear(6, 6), Noted(), nn.Linear(6, 6))
    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    split = SplitBackward()
    x = torch.randn(4, 6, requires_grad=True)
    with autocast, split.splitting():
        checkpointed = checkpoint(inner, x, use_reentrant=False)
        assert [one() for one in held] == [None, None]
        plain = inner(x)
    assert [one() is None for one in held[2:]] == [dtype is not None] * 2
    assert checkpointed.requires_grad
    assert plain.requires_grad


def sizes(deferred_uses: DeferredUses) -> Iterator[int]:
    return (tensor.nbytes for use in deferred_uses for tensor in (use.operands.x, use.gradient))


def test_autocast_casts_a_weight_once_per_step() -> None:
    layer, split = nn.Linear(6, 6), SplitBackward()
    with split.weight_cast_cache():
        kept = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16), split.splitting():
                output = layer(torch.randn(4, 6))
            kept += split.backward_input([output], [torch.ones_like(output)])
            del output
        one, other = (use.operands.weight for use in kept)
        assert one is other
        assert one.dtype == torch.bfloat16
        copy = weakref.ref(one)
        del one, other
        split.backward_weight(kept)
    assert copy() is None
    assert layer.weight.grad.dtype == torch.float32


class Reentered(Functions):
    """Uses the same weights inside and outside of a reentrant checkpoint."""

    def forward(self, numbers: Tensor) -> Tensor:
        x: Tensor = self.layer(self.rows(numbers))
        x = checkpoint(self.layer, x, use_reentrant=True)
        return functional.linear(self.layer(x), self.rows.weight)


@DTYPES
@pytest.mark.parametrize("build", [Functions, Reentered])
def test_counted_additions_equal_those_of_w(build: Build, dtype: torch.dtype | None) -> None:
    """One per backward that reaches a weight, however often it is used."""
    model, split, added = build(), SplitBackward(ignores_gradient=lambda _: True), Counter[Tensor]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: added.update([p]))
    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with split.weight_cast_cache():
        with autocast, split.splitting():
            loss = loss_of(model(torch.randint(10, (2, 5))))
        deferred_uses = split.backward_input([loss], [torch.ones(())])
        expected = count_additions(deferred_uses)
        added.clear()
        split.backward_weight(deferred_uses)
    assert expected == added
    assert max(expected.values()) == (3 if build is Reentered else 1)


def test_modules_with_backward_hooks_are_not_split() -> None:
    """A hook may wait for the end of the backward (`queue_callback`), and change gradients of parameters then."""
    split, model = SplitBackward(), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    for expected in (1, 0):
        with split.splitting(model):
            loss = loss_of(model(torch.randn(4, 6)))
        assert len(split.backward_input([loss], [torch.ones(())])) == expected
        model[1].register_full_backward_hook(lambda *_: None)
