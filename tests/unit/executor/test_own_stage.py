"""Tests of a rank's own layers, which have the values of the whole model and are built alone."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.device.meter import CpuMemoryMeter
from planner.executor.build.own_stage import BuildError, build_with_values
from planner.model.chain import chain_of
from planner.model.load import load_model

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
SMALL: dict[str, dict[str, str]] = {
    "mlp": {"depth": "4", "width": "32"},
    "resnet": {"num_classes": "4"},
    "transformer_lm": {
        "layers": "2",
        "width": "32",
        "feed_forward": "64",
        "heads": "4",
        "vocabulary": "64",
        "tokens": "16",
    },
    "amoebanet_d": {"num_layers": "3", "num_filters": "16"},
}
SEED = 11

Build = Callable[[], nn.Module]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, with tied ones under every name."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**named, **dict(module.named_buffers(remove_duplicate=False))}


def whole(build: Build) -> nn.Module:
    """Return the seeded model."""
    torch.manual_seed(SEED)
    return build()


def of_layers(names: Sequence[str]) -> Callable[[nn.Module], Iterable[Tensor]]:
    """Return the tensors of these layers."""
    return lambda model: [tensor for name in names for tensor in tensors_of(model.get_submodule(name)).values()]


NUMBER_BYTES = 64
"""Tensors no larger than this may exist on other stages: numbers that stand in the model's code."""


def check_own(build: Build, names: Sequence[str], *, needed: Sequence[str] = ()) -> nn.Module:
    """Build only the layers `names`, compare them with the whole model, and return the model.

    Args:
        build: Makes the model.
        names: The layers.
        needed: Layers from which these are computed, which may exist too.
    """
    expected = whole(build)
    after = torch.get_rng_state()
    torch.manual_seed(999)  # what came before must not matter
    own = build_with_values(build, of_layers(names), seed=SEED)
    assert torch.equal(torch.get_rng_state(), after), "the random state is that behind the whole model"
    compared = 0
    for name in names:
        for key, tensor in tensors_of(expected.get_submodule(name)).items():
            made = tensors_of(own.get_submodule(name))[key]
            assert (made.device.type, made.dtype, made.stride()) == ("cpu", tensor.dtype, tensor.stride()), (name, key)
            assert torch.equal(made, tensor), (name, key)
            assert made.requires_grad == tensor.requires_grad
            compared += 1
    wanted = {id(tensor) for tensor in of_layers([*names, *needed])(own)}
    others = {key: tensor for key, tensor in tensors_of(own).items() if id(tensor) not in wanted}
    assert [key for key, tensor in others.items() if not tensor.is_meta and tensor.nbytes > NUMBER_BYTES] == []
    assert compared
    assert others or len(names) == len(chain_of(own).names)
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "resnet" else []) for name in SMALL]
)
def test_stages_of_sample_models_are_built_alone(name: str) -> None:
    build = load_model(str(SAMPLE_MODELS / f"{name}.py"), settings=SMALL[name]).build
    with torch.device("meta"):
        names = chain_of(build()).names
    third = max(1, len(names) // 3)
    for part in (names[:third], names[third : 2 * third], names[-third:]):
        check_own(build, part)


def test_one_stage_has_the_whole_model() -> None:
    build = load_model(str(SAMPLE_MODELS / "mlp.py"), settings=SMALL["mlp"]).build
    with torch.device("meta"):
        names = chain_of(build()).names
    check_own(build, names)


# Ways to make a tensor

MADE: list[tuple[Callable[[nn.Linear], None], str]] = []


def made_by(function: Callable[[nn.Linear], None]) -> Callable[[nn.Linear], None]:
    """Register a way to initialize a layer."""
    MADE.append((function, function.__name__.strip("_")))
    return function


@made_by
def _kaiming(layer: nn.Linear) -> None:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.kaiming_uniform_(layer.weight, a=0.1)
    nn.init.zeros_(layer.bias)


@made_by
def _xavier_sparse_eye(layer: nn.Linear) -> None:
    nn.init.xavier_uniform_(layer.weight)
    nn.init.eye_(layer.weight)
    nn.init.constant_(layer.bias, 0.25)


@made_by
def _randn_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(layer.weight.shape) * 0.02)
    layer.bias = nn.Parameter(torch.rand_like(layer.bias))


@made_by
def _scaled_afterwards(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5).add_(torch.eye(8) * layer.bias.mean())
        layer.weight[0].fill_(7.0)
        layer.weight[:, 1:3] += layer.bias[:2]


@made_by
def _through_data(layer: nn.Linear) -> None:
    layer.weight.data.uniform_(-1, 1)
    layer.weight.data = layer.weight.data.t().contiguous() * 2
    layer.bias.data.copy_(layer.weight.data.sum(0))


@made_by
def _from_another_tensor(layer: nn.Linear) -> None:
    drawn = torch.randn(16, 16)
    layer.weight = nn.Parameter(drawn[4:12, 4:12].clone())
    layer.bias = nn.Parameter(torch.cat([drawn[0, :4], drawn[1, :4]]))


@made_by
def _constants(layer: nn.Linear) -> None:
    layer.register_buffer("ramp", torch.arange(8.0))
    layer.register_buffer("steps", torch.linspace(0, 1, 8))
    layer.register_buffer("numbers", torch.tensor([3.0, 1.0, 4.0]))
    layer.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril())
    layer.register_buffer("count", torch.tensor(7))
    layer.register_buffer("halves", torch.full((3,), 0.5, dtype=torch.float16))


@made_by
def _permutation(layer: nn.Linear) -> None:
    layer.register_buffer("order", torch.randperm(8))
    layer.register_buffer("choice", torch.randint(5, (8,)))
    layer.register_buffer("coins", torch.bernoulli(torch.full((8,), 0.5)))
    layer.register_buffer("times", torch.empty(8).exponential_())


@made_by
def _shuffled(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(layer.weight[torch.randperm(8)])


@made_by
def _transposed_and_expanded(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(8, 8).t())
    layer.register_buffer("wide", torch.randn(8, 1).expand(8, 4))


@made_by
def _own_generator(layer: nn.Linear) -> None:
    generator = torch.Generator().manual_seed(5)
    layer.weight = nn.Parameter(torch.randn(8, 8, generator=generator))
    layer.bias.data.normal_(generator=generator)


@made_by
def _fourier_features(layer: nn.Linear) -> None:
    position = torch.arange(8).unsqueeze(1)
    scale = torch.exp(torch.arange(0, 8, 2) * -0.1)
    table = torch.zeros(8, 8)
    table[:, 0::2] = torch.sin(position * scale)
    table[:, 1::2] = torch.cos(position * scale)
    layer.register_buffer("table", table)


@made_by
def _seeded_inside(layer: nn.Linear) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer.weight = nn.Parameter(torch.randn(8, 8))


@pytest.mark.parametrize("make", [m for m, _ in MADE], ids=[name for _, name in MADE])
@pytest.mark.parametrize("wanted", ["0", "1", "2"])
def test_initializers_give_the_values_of_the_whole_model(make: Callable[[nn.Linear], None], wanted: str) -> None:

    def build() -> nn.Module:
        layers = [nn.Linear(8, 8) for _ in range(3)]
        for layer in layers:
            make(layer)
        return nn.Sequential(*layers)

    check_own(build, [wanted])


def _to_empty() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return model.to_empty(device="cpu")


def _skip_init() -> nn.Module:
    return nn.Sequential(*(nn.utils.skip_init(nn.Linear, 8, 8) for _ in range(3)))


@pytest.mark.parametrize("build", [_to_empty, _skip_init])
def test_layers_that_begin_on_the_meta_device_draw_nothing_there(build: Callable[[], nn.Module]) -> None:
    """Torch draws no random numbers for meta tensors, so the later initialization uses the first numbers."""

    def initialized() -> nn.Module:
        model = build()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    check_own(initialized, ["1"])


def _draw_until_positive(layer: nn.Linear) -> None:
    with torch.no_grad():
        while float(layer.bias.normal_().sum()) < 3:
            pass


REFUSABLE: dict[str, Callable[[nn.Linear], object]] = {
    # torch does not convert a module whose parameters are fake.
    "double": lambda layer: layer.double().requires_grad_(False),
    # On the meta device torch skips these two, random draws and all.
    "orthogonal": lambda layer: nn.init.orthogonal_(layer.weight, gain=1.3),
    "truncated normal": lambda layer: nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.03, b=0.03),
    # As careful authors write it.
    "unless meta": lambda layer: None if layer.weight.is_meta else nn.init.normal_(layer.weight),
    # How many numbers these draw depends on values.
    "poisson": lambda layer: layer.weight.data.copy_(torch.poisson(torch.full((8, 8), 50.0))),
    "gamma": lambda layer: layer.weight.data.copy_(torch._standard_gamma(torch.full((8, 8), 2.0))),
    "multinomial": lambda layer: layer.weight.data.fill_(torch.multinomial(torch.ones(8), 3).sum()),
    "until it fits": _draw_until_positive,
}


@pytest.mark.parametrize("name", REFUSABLE)
@pytest.mark.parametrize("wanted", ["0", "1", "2"])
def test_untraceable_initializers_are_refused_or_exact(name: str, wanted: str) -> None:

    def build() -> nn.Module:
        layers = [nn.Linear(8, 8) for _ in range(2)]
        REFUSABLE[name](layers[0])
        return nn.Sequential(*layers, nn.Linear(8, 8))

    try:
        own = build_with_values(build, of_layers([wanted]), seed=SEED)
    except BuildError:
        return
    expected = tensors_of(whole(build).get_submodule(wanted))
    made = tensors_of(own.get_submodule(wanted))
    assert [key for key, value in expected.items() if not torch.equal(made[key], value)] == []


def test_values_computed_from_other_layers_are_exact() -> None:

    def build() -> nn.Module:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            second.weight.copy_(first.weight.t() * 2)
            first.weight.zero_()
        return nn.Sequential(first, second, nn.Linear(8, 8))

    own = check_own(build, ["1"], needed=["0"])
    assert own.get_submodule("1").weight.detach().any()


def test_tied_weights_stay_tied() -> None:
    """Embedding and head share a table, whichever comes first."""

    def build() -> nn.Module:
        embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.Linear(8, 8), head)

    for wanted in ("0", "2"):
        own = check_own(build, [wanted])
        assert own.get_submodule("0").weight is own.get_submodule("2").weight


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: nn.Sequential(nn.Embedding(9, 8, padding_idx=2), nn.Linear(8, 8)), id="padding"),
        pytest.param(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)), id="norms"),
        pytest.param(lambda: nn.Sequential(nn.LSTM(8, 8, 2), nn.Linear(8, 8)), id="lstm"),
        pytest.param(lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), id="attention"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 2)), id="convolutions"),
        pytest.param(lambda: nn.Sequential(nn.Bilinear(4, 4, 4), nn.PReLU()), id="bilinear"),
        pytest.param(
            lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.TransformerEncoderLayer(8, 2, 16)),
            id="transformer",
        ),
        pytest.param(
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
            id="weight norm",
        ),
        pytest.param(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).apply(_initialise), id="apply"),
    ],
)
def test_layers_of_torch_are_built_exactly(build: Build) -> None:
    check_own(build, ["0"])
    check_own(build, ["1"])


def test_draws_into_a_computed_weight_have_no_effect() -> None:
    """As in Wav2Vec2's weight norm."""

    def build() -> nn.Module:
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        nn.init.normal_(normed.weight)
        return nn.Sequential(normed, nn.Linear(8, 8))

    check_own(build, ["0"])
    check_own(build, ["1"])
    together = tensors_of(build_with_values(build, lambda model: tensors_of(model).values(), seed=SEED))
    assert all(torch.equal(tensor, together[name]) for name, tensor in tensors_of(whole(build)).items())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


# What cannot be followed


def test_construction_that_depends_on_values_is_refused() -> None:
    """`.item()` of a drawn number has no value on the meta device."""

    def build() -> nn.Module:
        rate = torch.rand(()).item()
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate))

    with pytest.raises(BuildError):
        build_with_values(build, of_layers(["0"]), seed=SEED)


def test_constructions_that_differ_when_repeated_are_refused() -> None:
    calls = count()

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(8, 8)]
        if next(calls) % 2:
            layers.insert(0, nn.Embedding(3, 3))
        return nn.Sequential(*layers)

    with pytest.raises(BuildError, match="not built the same way twice"):
        build_with_values(build, of_layers(["0"]), seed=SEED)


def test_failing_constructors_are_refused_with_the_cause() -> None:
    """No dispatch mode remains afterwards."""

    def build() -> nn.Module:
        raise ValueError("no such size")

    with pytest.raises(BuildError, match="no such size"):
        build_with_values(build, of_layers(["0"]), seed=SEED)
    assert not torch.zeros(3).is_meta


def test_only_the_layers_of_the_stage_take_memory() -> None:

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])

    layer = 4 * (256 * 256 + 256)
    built: list[Any] = []
    usage = CpuMemoryMeter().measure(lambda: built.append(build_with_values(build, of_layers(["7"]), seed=SEED)))
    assert layer <= usage.end_bytes <= 1.1 * layer
    assert usage.peak_bytes <= 2.1 * layer
