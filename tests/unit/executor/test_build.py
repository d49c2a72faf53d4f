"""Tests of models on the meta device, and of layers of one stage with the values of the whole model."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import identity

from planner.core.errors import ModelError
from planner.device.meter import CpuMemoryMeter
from planner.executor.build import building
from planner.executor.build.building import StageRange, build_stages, build_structure
from planner.executor.run.shapes import chain_shapes
from planner.model.chain import Chain, Layer, chain_digest, chain_of, tied_parameters
from planner.model.ghosts import AbsentGhost
from planner.model.load import LoadedModel
from planner.model.seeding import seed_process
from planner.model.stage import ModelStage
from planner.profile.structure import find_chain
from tests.support.measure import loaded_model
from tests.zoo.models.memory_kinds import WORDS, Recurrent

CPU = torch.device("cpu")


def plain() -> nn.Sequential:
    """Return Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def by_value() -> nn.Sequential:
    """Return stochastic depth as usually written: rates from a tensor, one `.item()` each."""
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(rates[1]), nn.Linear(16, 4))


def on_the_cpu() -> nn.Sequential:
    """Return a layer with an explicit device."""
    return nn.Sequential(nn.Linear(8, 16, device="cpu"), nn.ReLU(), nn.Linear(16, 4))


class Pruned(nn.Module):
    """Computes weights of its layers from parameters in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(identity(nn.Linear(8, 8), "weight") for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


class SharesMask(nn.Module):
    """Block of CLIP, which passes a mask on that all blocks hold in an attribute."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.attention, self.mask = nn.MultiheadAttention(8, 2), mask

    def forward(self, value: Tensor) -> Tensor:
        self.mask = self.mask.to(dtype=value.dtype, device=value.device)
        result: Tensor = self.attention(value, value, value, need_weights=False, attn_mask=self.mask)[0]
        return result


class SharedMask(nn.Module):
    """Has blocks that hold the same mask."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.empty(5, 5).fill_(2.0)
        self.stem, self.blocks = nn.Linear(8, 8), nn.Sequential(*[SharesMask(mask) for _ in range(3)])

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.stem(value).transpose(0, 1))
        return result.transpose(0, 1)


class Masked(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = torch.ones(8).cumsum(0)
        self.nested = {"scales": [torch.rand(8)]}

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value) * self.mask + self.nested["scales"][0]


def masked() -> nn.Sequential:
    """Return two such layers."""
    return nn.Sequential(Masked(), Masked())


def tied() -> nn.Sequential:
    """Return an embedding and a head with one table, and a layer that uses one weight twice."""
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    inner = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    inner[1].weight = inner[0].weight
    return nn.Sequential(embedding, _Both(inner), head)


def initialized() -> nn.Sequential:
    """Return layers with two initializers that do nothing on the meta device."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    nn.init.trunc_normal_(layers[0].weight, std=0.02)
    nn.init.orthogonal_(layers[1].weight)
    return nn.Sequential(*layers)


class _Both(nn.Module):
    def __init__(self, inner: nn.ModuleList) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](value))


def all_tensors(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


MODELS = [plain, by_value, on_the_cpu, masked, tied, initialized]


def finished(build: Callable[[], nn.Sequential]) -> LoadedModel:
    """Load the model as a module-level `model`."""
    return loaded_model(build())


@pytest.mark.parametrize("ready", [False, True], ids=["built", "finished"])
@pytest.mark.parametrize("build", MODELS)
def test_meta_device_structure_equals_the_model(build: Callable[[], nn.Sequential], *, ready: bool) -> None:
    """Compare names, digest and ties. A finished model is not changed."""
    loaded = finished(build) if ready else loaded_model(build)
    model = loaded.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chain = build_structure(loaded)
    assert chain.names == chain_of(model).names
    assert all(tensor.is_meta for layer in chain.layers for tensor in all_tensors(layer.module))
    assert chain_digest(chain, {}) == chain_digest(chain_of(model), {})
    assert tied_parameters(chain.layers) == tied_parameters(chain_of(model).layers)
    if ready:
        assert loaded.build() is model
        assert [name for name, value in before.items() if not torch.equal(model.state_dict()[name], value)] == []
        assert not any(tensor.is_meta for tensor in all_tensors(model))


@pytest.mark.parametrize("ready", [False, True], ids=["built", "finished"])
@pytest.mark.parametrize("build", MODELS)
def test_shapes_are_found_on_the_meta_device(build: Callable[[], nn.Sequential], *, ready: bool) -> None:
    loaded = finished(build) if ready else loaded_model(build)
    inputs = torch.randint(20, (2, 3)) if build is tied else torch.randn(2, 8)
    shapes = chain_shapes(build_structure(loaded), inputs)
    expected = loaded.build()(inputs).shape
    assert shapes.boundaries[-1].tensors[0].shape == expected


class MaskedByNumPy(nn.Module):
    """Module that overwrites features with a learned vector, as SpecAugment does, and reads a number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones((), device="cpu")
        self.instead = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        value = self.blocks[0](value).clone()
        value[torch.from_numpy(np.arange(len(value)) % 2 == 0)] = self.instead
        for block in self.blocks[1:]:
            value = block(value)
        return value / max(float(value.detach().abs().max()), float(self.scale))


class Routed(nn.Module):
    """Experts, of which each gets the samples that the gate chooses for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, value: Tensor) -> Tensor:
        chosen = self.gate(value).argmax(1)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            value = value.index_add(0, rows, expert(value[rows]))
        return self.head(value)


def test_values_that_decide_shapes_are_the_same_in_every_process() -> None:
    """Another seed of the run would otherwise result in another chain than the planned one."""
    loaded = replace(loaded_model(Routed), granularity="fine")
    chains = set()
    for seed in range(6):
        seed_process(seed)
        chains.add(build_structure(loaded).names)
        chains.add(find_chain(loaded, CPU)[0].names)
    assert len(chains) == 1


def test_a_forward_that_needs_values_is_cut_on_values() -> None:
    """The structure of a model whose forward reads values is found even if its constructor ignores the meta device."""
    loaded = loaded_model(MaskedByNumPy)
    chain = build_structure(loaded)
    assert chain.names == loaded.chain(MaskedByNumPy()).names
    assert all(tensor.is_meta for tensor in all_tensors(chain.model))


def stage_layers(loaded: LoadedModel, chain: Chain, first: int, end: int) -> tuple[Layer, ...]:
    """Return layers `first` to `end - 1` as those of one stage."""
    (layers,) = build_stages(loaded, chain, [StageRange(first, end)], seed=4, device=CPU)
    return layers


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("index", [0, -1])
def test_stage_layers_equal_those_of_the_seeded_model(build: Callable[[], nn.Sequential], index: int) -> None:
    """This includes constructions that cannot be traced, for which the whole model is built."""
    torch.manual_seed(4)
    chain = chain_of(build())
    expected, n = chain.layers[index], index % len(chain.layers)
    (layer,) = stage_layers(loaded_model(build), chain, n, n + 1)
    values, made = expected.module.state_dict(), layer.module.state_dict()
    assert layer.name == expected.name
    assert values.keys() == made.keys()
    assert all(torch.equal(made[name], value) for name, value in values.items())


def by_numpy() -> nn.Sequential:
    """Return layers with initial values from NumPy, as in DLRM, and from Python."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    for layer in model:
        layer.weight.data = torch.tensor(np.random.normal(size=tuple(layer.weight.shape)).astype(np.float32))  # noqa: NPY002 - as users do
    model[1].bias.data.fill_(random.random())
    return model


def test_initial_values_of_numpy_are_those_of_the_seeded_model() -> None:
    """The model is built several times, and only torch's generator was seeded again."""
    seed_process(4)
    expected = by_numpy().state_dict()
    loaded = loaded_model(by_numpy)
    chain = build_structure(loaded)
    made = [stage_layers(loaded, chain, n, n + 1)[0].module.state_dict() for n in range(2)]
    assert torch.equal(made[0]["weight"], expected["0.weight"])
    assert all(torch.equal(made[1][name], expected[f"1.{name}"]) for name in ("weight", "bias"))


@pytest.mark.parametrize("build", MODELS)
def test_stage_layers_run_without_meta_tensors(build: Callable[[], nn.Sequential]) -> None:
    torch.manual_seed(4)
    model = build().eval()
    inputs = torch.randint(20, (2, 3)) if build is tied else torch.randn(2, 8)
    chain = chain_of(model)
    layers = stage_layers(loaded_model(lambda: build().eval()), chain, 0, len(chain.layers))
    value = inputs
    for layer in layers:
        value = layer.module(value)
    assert torch.equal(value, model(inputs))


def test_single_stage_layers_run() -> None:
    torch.manual_seed(4)
    model, inputs = masked(), torch.randn(2, 8)
    (layer,) = stage_layers(loaded_model(masked), chain_of(model), 1, 2)
    assert torch.equal(layer.module(inputs), model[1](inputs))


def test_layers_of_a_finished_model_keep_their_weights() -> None:
    loaded = finished(plain)
    model = loaded.build()
    layers = stage_layers(loaded, chain_of(model), 1, 3)
    assert [layer.module for layer in layers] == [model[1], model[2]]


def test_a_stage_holds_no_weights_of_other_stages_recurrent_layers() -> None:
    """An LSTM or GRU also lists its weights in an attribute."""
    loaded = loaded_model(Recurrent, lambda size: torch.randint(WORDS, (size, 4)))
    chain = build_structure(loaded)
    at = next(n for n, layer in enumerate(chain.layers) if isinstance(chain.model.get_submodule(layer.name), nn.LSTM))
    layers = []
    usage = CpuMemoryMeter().measure(
        lambda: layers.extend(
            build_stages(loaded, chain, [StageRange(at, at + 1)], seed=4, device=torch.device("cpu"))[0]
        )
    )
    own = sum(tensor.nbytes for tensor in all_tensors(layers[0].module))
    assert own == sum(p.nbytes for p in chain.model.get_submodule(chain.names[at]).parameters())
    assert own <= usage.end_bytes <= own + 1024
    for part in layers[0].module.model.modules():
        if isinstance(part, nn.RNNBase):
            assert [id(weight) for weight in part._flat_weights] == [id(p) for p in part.parameters()]


def test_errors_of_the_constructor_are_reported() -> None:

    def broken() -> nn.Module:
        raise ModelError("model.py:3: `build_model()` raised ValueError: no")

    for attempt in (build_structure, lambda loaded: stage_layers(loaded, chain_of(plain()), 0, 1)):
        with pytest.raises(ModelError, match="raised ValueError: no"):
            attempt(loaded_model(broken))


def test_a_weight_computed_from_parameters_of_another_stage_is_not_held() -> None:
    """It would keep those parameters alive."""
    loaded = loaded_model(Pruned)
    chain = build_structure(loaded)
    ((layer,),) = build_stages(loaded, chain, [StageRange(0, 1)], seed=1, device=CPU)
    assert isinstance(layer.module, ModelStage)
    weights = [vars(part)["weight"] for part in layer.module.model.layers]
    assert [isinstance(weight, AbsentGhost) for weight in weights] == [False, True, True]


class Positions(nn.Module):
    """Linear layer and table that a constructor on the meta device leaves to the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        factors = torch.arange(8.0)
        if not factors.is_meta:
            self.register_buffer("table", factors, persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(8.0), persistent=False)
        return self.linear(value) * self.table


def test_the_structure_has_tensors_that_the_meta_device_would_lack() -> None:
    """Stages would not have the table, and the model would be refused."""
    chain = build_structure(loaded_model(lambda: nn.Sequential(Positions(), Positions())))
    assert {name for name, _ in chain.model.named_buffers()} == {"0.table", "1.table"}
    assert all(tensor.is_meta for tensor in all_tensors(chain.model))


def test_initializers_that_read_is_meta_need_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every rank would hold the whole model for a moment."""

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        nn.init.trunc_normal_(model[0].weight)
        nn.init.orthogonal_(model[1].weight)
        return model

    monkeypatch.setattr(building, "_built", lambda _: pytest.fail("the model was built with values"))
    assert all(tensor.is_meta for tensor in all_tensors(build_structure(loaded_model(build)).model))


def test_sparse_buffers_are_refused_when_the_structure_is_built() -> None:
    """Some sparse tensors can only be made with values."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            ends = torch.arange(4)
            sparse = torch.sparse_coo_tensor(torch.stack([ends, ends.flip(0)]), torch.ones(4), (4, 4))
            self.register_buffer("adjacency", sparse.coalesce())

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value

    with pytest.raises(ModelError, match=r'"0.adjacency" is a sparse tensor'):
        build_structure(loaded_model(lambda: nn.Sequential(Graph(), nn.Linear(8, 8)), 8))


def test_a_mask_in_an_attribute_of_all_blocks_does_not_merge_the_layers_of_a_run() -> None:
    """`profile` found four layers and a run found two, so the run did not start."""
    loaded = loaded_model(SharedMask, lambda batch: torch.randn(batch, 5, 8))
    names = "stem", "blocks.0", "blocks.1", "blocks.2"
    assert build_structure(loaded).names == loaded.chain(SharedMask()).names == names
