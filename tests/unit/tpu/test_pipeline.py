"""Plans as one JAX program on virtual devices: loss and gradients, compared with torch."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import UsageError
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import Recompute
from planner.core.values.profile import Model
from planner.model import LoadedModel, load_module

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")


SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"


def module_of(path: Path) -> Any:
    """Import a sample model's file."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pair(nn.Module):
    """Returns a pair (output, skip) as AmoebaNet's cells do."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width_in, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, value: Any) -> Any:
        hidden, skip = value if isinstance(value, tuple) else (value, value)
        return self.inner(hidden) + skip.mean(dim=1, keepdim=True), hidden


class Last(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, 3)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(self.norm(value[0])) + value[1].sum(dim=1, keepdim=True)


def uneven(widths: Sequence[int] = (8, 24, 8, 40, 8)) -> LoadedModel:
    """Load a model of layers of different widths, one of them frozen."""
    torch.manual_seed(0)
    layers = [Pair(a, b) for a, b in pairwise(widths)]
    layers[1].requires_grad_(requires_grad=False)
    named = [(f"layer_{n}", layer) for n, layer in enumerate(layers)]
    model = nn.Sequential(OrderedDict([*named, ("last", Last(widths[-1]))]))
    return load_module(
        model,
        example_batch=lambda size: (torch.randn(size, widths[0]), torch.randint(3, (size,))),
        loss_fn=nn.functional.cross_entropy,
        optimizer="sgd",
    )


def tied() -> LoadedModel:
    """Load a model with two tied layers."""
    torch.manual_seed(0)
    twice = nn.Linear(8, 8)
    model = nn.Sequential(OrderedDict(a=twice, b=nn.Tanh(), c=nn.Linear(8, 8), d=twice))
    model._modules["d"] = nn.Linear(8, 8)
    model.d.weight = twice.weight
    return load_module(
        model,
        example_batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss_fn=nn.functional.mse_loss,
        optimizer="sgd",
    )


def balance_of(
    loaded: LoadedModel,
    cuts: Sequence[int],
    micro_batches: int,
    recompute: Sequence[Recompute] = (),
    names: Sequence[str] = (),
) -> Balance:
    names = names or list(loaded.build()._modules)
    spans = pairwise(accumulate(cuts, initial=0))
    choices = recompute or ["never"] * len(cuts)
    return Balance(
        plan_digest="",
        model=Model(),
        schedule="gpipe",
        batch=8,
        micro_batches=micro_batches,
        balance=tuple(cuts),
        stages=tuple(
            StageBalance(
                index=k,
                recompute=choice,
                layers=tuple(names[a:b]),
                recomputed=tuple(names[a:b:2]) if choice == "layers" else (),
            )
            for k, ((a, b), choice) in enumerate(zip(spans, choices, strict=True))
        ),
    )


def check_against_torch(
    loaded: LoadedModel, balance: Balance, *, relative: float = 1e-4, absolute: float = 1e-5, **options: Any
) -> None:
    """Compare loss and every gradient with torch's; `options` are the compiler's."""
    import jax

    from planner.tpu.pipeline import JaxPipeline
    from planner.tpu.stage import StageInput

    model = loaded.build()
    pipeline = JaxPipeline(loaded, loaded.chain(model), balance, jax.devices()[: len(balance.balance)])
    inputs, targets = loaded.example_batch(8)
    trained, fixed = pipeline.parameters()
    step = jax.jit(pipeline.loss_and_gradients, compiler_options=options)
    loss, packed = step(trained, fixed, StageInput(*pipeline.split_batch(inputs, targets), jax.random.key(0)))
    model.zero_grad()
    expected = torch.zeros(())
    for some, wanted in zip(inputs.chunk(balance.micro_batches), targets.chunk(balance.micro_batches), strict=True):
        part = loaded.loss_fn(model(some), wanted) / balance.micro_batches
        part.backward()
        expected += part.detach()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-4)
    gradients = pipeline.arrays_by_name(packed)
    wanted_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(gradients) == wanted_names
    for name, parameter in model.named_parameters():
        if name in wanted_names:
            assert parameter.grad is not None
            gradient = torch.from_numpy(gradients[name].copy())
            torch.testing.assert_close(gradient, parameter.grad, rtol=relative, atol=absolute)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuts", "micro_batches", "recompute"),
    [
        pytest.param((5,), 2, (), marks=pytest.mark.nightly),
        pytest.param((2, 3), 1, (), marks=pytest.mark.nightly),
        pytest.param((1, 4), 4, ("always", "never"), marks=pytest.mark.nightly),
        ((1, 1, 1, 2), 2, ("layers", "never", "always", "layers")),
    ],
)
def test_loss_and_gradients_equal_torchs(cuts, micro_batches, recompute):
    """Unequal stages, pairs across boundaries, a frozen layer, batch norm, and all recompute options."""
    loaded = uneven()
    check_against_torch(loaded, balance_of(loaded, cuts, micro_batches, recompute))


@pytest.mark.nightly
def test_amoebanets_gradients_equal_torchs_in_float64() -> None:
    """In float32 torch's own gradients differ by 2e-3: those of weights before a batch norm nearly cancel out."""
    import jax

    amoebanet = module_of(SAMPLE_MODELS / "amoebanet_d.py")
    torch.manual_seed(0)
    layers = OrderedDict(
        stem=amoebanet.Stem(8),
        reduction=amoebanet.Cell(8, 8, 16, reduces=True, skip_reduces=False, is_last=False),
        cell=amoebanet.Cell(48, 8, 16, reduces=False, skip_reduces=True, is_last=True),
        classifier=amoebanet.Classifier(64, 4),
    )
    loaded = load_module(
        nn.Sequential(layers).double(),
        example_batch=lambda size: (torch.randn(size, 3, 17, 17, dtype=torch.float64), torch.randint(4, (size,))),
        loss_fn=nn.functional.cross_entropy,
        optimizer="sgd",
    )
    # What takes long is the compiler.
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with jax.enable_x64(True):
        check_against_torch(loaded, balance_of(loaded, (2, 2), 2), relative=1e-8, absolute=1e-12, **quickly)


@pytest.mark.nightly
def test_more_stages_than_micro_batches_equal_torch() -> None:
    loaded = uneven((8,) * 9)
    check_against_torch(loaded, balance_of(loaded, (1, 1, 1, 1, 1, 1, 1, 2), 4))


def load_of_width_8(model: nn.Module) -> LoadedModel:
    return load_module(
        model,
        example_batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss_fn=nn.functional.mse_loss,
        optimizer="sgd",
    )


class Added(nn.Module):
    """Residuals in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.places = nn.Parameter(torch.randn(8))

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value) + self.places
        for block in list(self.blocks)[1:]:
            value = value + torch.tanh(block(value))
        return value


@pytest.mark.slow
def test_sums_between_modules_cross_the_cuts() -> None:
    torch.manual_seed(0)
    loaded = load_of_width_8(Added())
    chain = loaded.chain(loaded.build())
    assert [len(values) for values in chain.outline.crossings] == [1, 1, 1]
    check_against_torch(
        loaded, balance_of(loaded, (1, 1, 1, 1), 2, ("never", "always", "never", "always"), chain.names)
    )


class Angles(nn.Module):
    """Reads only the device of its input, as rotary embeddings do."""

    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.rates.to(value.device).float().cos().to(value.dtype)


class Rotated(nn.Module):
    """Blocks that all read the result of `Angles`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.angles = Angles()

    def forward(self, value: Tensor) -> Tensor:
        angles = self.angles(value)
        for block in self.blocks:
            value = value + angles * block(value)
        return value


@pytest.mark.slow
def test_a_module_that_reads_its_inputs_device_runs_in_every_stage() -> None:
    """Later stages do not have its input. The device was once the host's, so Llama could not run."""
    torch.manual_seed(0)
    loaded = load_of_width_8(Rotated())
    check_against_torch(loaded, balance_of(loaded, (1, 1, 1), 2, names=loaded.chain(loaded.build()).names))


def test_tied_parameters_must_be_in_one_stage() -> None:
    """Two copies of a weight would be trained separately."""
    from planner.tpu.pipeline import JaxPipeline

    loaded = tied()
    check_against_torch(loaded, balance_of(loaded, (4,), 2))
    with pytest.raises(UsageError, match=r'"d.weight" is the same parameter as "a.weight" in another stage'):
        JaxPipeline(loaded, loaded.chain(loaded.build()), balance_of(loaded, (2, 2), 2), [None, None])


def test_losses_that_are_no_mean_over_samples_are_refused() -> None:
    """Their mean over micro-batches would be another loss."""
    from planner.tpu.pipeline import JaxPipeline

    loaded = replace(uneven(), loss_count=lambda target: target.numel())
    with pytest.raises(UsageError, match="defines `loss_count`"):
        JaxPipeline(loaded, loaded.chain(loaded.build()), balance_of(loaded, (5,), 2), [None])


def test_micro_batches_with_different_numbers_of_labels_are_refused() -> None:
    """The program takes the mean of the micro-batches' losses."""
    import jax

    from planner.tpu.pipeline import JaxPipeline

    loaded = replace(uneven(), counted_labels="all")
    pipeline = JaxPipeline(loaded, loaded.chain(loaded.build()), balance_of(loaded, (5,), 2), jax.devices()[:1])
    labels = torch.ones(4, 3, dtype=torch.int64)
    pipeline.split_batch({"labels": labels}, None)
    labels[0, 0] = -100
    with pytest.raises(UsageError, match="between 5 and 6 labels"):
        pipeline.split_batch({"labels": labels}, None)


def test_packing_keeps_shapes_apart_while_that_wastes_little() -> None:
    """Equal blocks share slots; stages without common shapes share one vector, as long as the longest stage."""
    import jax
    import numpy as np

    from planner.tpu.mesh_program import Packing

    def shapes(*sizes: tuple[int, ...]) -> list[Any]:
        return [jax.ShapeDtypeStruct(size, np.float32) for size in sizes]

    alike = Packing([shapes((4, 4), (4,), (4, 4)), shapes((4, 4), (4,))])
    assert sorted(s.shape for s in alike.shapes) == [(4,), (4, 4), (4, 4)]
    unlike = Packing([shapes((4, 4)), shapes((2, 5)), shapes((3, 3), (1,))], in_loops=True)
    assert [s.shape for s in unlike.shapes] == [(16,)]
    in_rows = Packing([shapes((40, 30)), shapes((30, 40)), shapes((1100,))])
    assert [s.shape for s in in_rows.shapes] == [(16, 128)]
    # Of 64 columns half a row is empty, and what has as many rows shares the place.
    images = Packing([shapes((2, 16, 64, 64), (8, 256)), shapes((8, 16, 32, 32), (2, 60, 16, 60))], in_loops=True)
    assert sorted(s.shape for s in images.shapes) == [(8, 256), (904, 128), (1024, 128)]
    for packing, stages in ((alike, 2), (unlike, 3), (in_rows, 3), (images, 2)):
        for k in range(stages):
            own = [np.full(s.shape, n + 1, s.dtype) for n, s in enumerate(packing._stages[k])]
            back = packing.unpack(k, packing.pack(k, own, np))
            assert all((a == b).all() for a, b in zip(own, back, strict=True))
