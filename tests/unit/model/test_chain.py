"""Layers and digest of an `nn.Sequential`."""

import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.profile import Setting
from planner.model.chain import Layer, chain_digest, chain_of, run_layers, tied_parameters
from tests.support.cli import environment


class CallsTwice(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(super().forward(value))


def digest(model: nn.Module, **settings: Setting) -> str:
    """Return the digest of the model's chain."""
    return chain_digest(chain_of(model), settings)


def nested() -> nn.Sequential:
    inner = nn.Sequential(OrderedDict(act=nn.ReLU(), last=nn.Linear(8, 8)))
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), inner), nn.Tanh())


def test_nested_sequentials_are_flattened_by_path() -> None:
    model = nested()
    chain = chain_of(model)
    assert chain.names == ("0", "1.0", "1.1.act", "1.1.last", "2")
    assert all(model.get_submodule(layer.name) is layer.module for layer in chain.layers)


def test_running_all_layers_equals_running_the_model() -> None:
    model, value = nested(), torch.randn(3, 8)
    assert torch.equal(run_layers([layer.module for layer in chain_of(model).layers], value), model(value))
    assert run_layers([], value) is value


def test_a_module_used_twice_is_two_tied_layers() -> None:
    shared, act = nn.Linear(8, 8), nn.ReLU()
    chain = chain_of(nn.Sequential(shared, act, shared, act))
    assert chain.names == ("0", "1", "2", "3")
    assert chain.layers[0].module is chain.layers[2].module
    tied = tied_parameters(chain.layers)
    assert tied == {
        "0.weight": ("2.weight",),
        "0.bias": ("2.bias",),
        "2.weight": ("0.weight",),
        "2.bias": ("0.bias",),
    }


def test_a_nested_sequential_used_twice_is_flattened_twice() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert chain_of(nn.Sequential(block, block)).names == ("0.0", "0.1", "1.0", "1.1")


@pytest.mark.parametrize(
    "make",
    [
        lambda: CallsTwice(nn.Linear(8, 8)),
        lambda: _hooked(nn.Sequential(nn.Linear(8, 8))),
        lambda: nn.ModuleList([nn.Linear(8, 8)]),
        nn.Sequential,
    ],
    ids=["own forward", "hooked", "another container", "empty"],
)
def test_containers_with_own_forward_or_hooks_stay_one_layer(make: Callable[[], nn.Module]) -> None:
    """Flattening would lose the forward or the hooks."""
    assert chain_of(nn.Sequential(nn.ReLU(), make())).names == ("0", "1")


def _hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda *_: None)
    return model


def test_a_subclass_that_only_adds_a_constructor_is_flattened() -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8), nn.ReLU())

    assert chain_of(Net()).names == ("0", "1")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(8, 8), "the model is a Linear"),
        (CallsTwice(nn.Linear(8, 8)), "the model is a CallsTwice"),
        (nn.ModuleList([nn.Linear(8, 8)]), "the model is a ModuleList"),
        (nn.Sequential(), "empty nn.Sequential"),
        (nn.Sequential(nn.Sequential(), nn.Sequential()), None),
    ],
)
def test_only_non_empty_sequentials_have_layers(model: nn.Module, message: str | None) -> None:
    """A Sequential of empty Sequentials is a chain of identities."""
    if message is None:
        assert chain_of(model).names == ("0", "1")
        return
    with pytest.raises(ModelError) as refused:
        chain_of(model)
    assert message in str(refused.value)


def test_parameter_names_are_those_of_the_model() -> None:
    model = nested()
    names = [name for layer in chain_of(model).layers for name in layer.parameters_by_name()]
    assert names == [name for name, _ in model.named_parameters()]


# Tied parameters


def test_weights_in_one_storage_are_tied() -> None:
    one, two, three = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    two.weight = one.weight
    three.weight = nn.Parameter(one.weight.data)
    layers = chain_of(nn.Sequential(one, two, three, nn.Linear(8, 8))).layers
    assert tied_parameters(layers) == {
        "0.weight": ("1.weight", "2.weight"),
        "1.weight": ("0.weight", "2.weight"),
        "2.weight": ("0.weight", "1.weight"),
    }


def test_weights_tied_within_one_layer_are_not_reported() -> None:
    pair = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    pair[1].weight = pair[0].weight
    assert tied_parameters([Layer("0", pair), Layer("1", nn.Linear(8, 8))]) == {}


def test_empty_parameters_are_not_tied() -> None:
    """Empty tensors all have the same address."""
    layers = [Layer(str(n), nn.ParameterList([nn.Parameter(torch.zeros(0))])) for n in range(2)]
    assert tied_parameters(layers) == {}


def test_tied_weights_are_found_on_the_meta_device() -> None:
    """The executor builds the model there."""
    with torch.device("meta"):
        one, two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        two.weight = one.weight
        model = nn.Sequential(one, two, nn.Linear(8, 8, bias=False))
    assert tied_parameters(chain_of(model).layers) == {"0.weight": ("1.weight",), "1.weight": ("0.weight",)}


# Digest


def test_digest_ignores_weights_and_device() -> None:
    torch.manual_seed(0)
    one = nested()
    torch.manual_seed(1)
    two = nested()
    with torch.device("meta"):
        three = nested()
    assert not torch.equal(next(one.parameters()), next(two.parameters()))
    assert digest(one) == digest(two) == digest(three)
    assert digest(one).startswith("sha256:")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.append(nn.ReLU()), id="one layer more"),
        pytest.param(lambda m: m.pop(2), id="one layer less"),
        pytest.param(lambda m: m.__setitem__(0, nn.Linear(8, 8, bias=False)), id="no bias"),
        pytest.param(lambda m: m.__setitem__(2, nn.Sigmoid()), id="another class"),
        pytest.param(lambda m: m.__setitem__(2, nn.Dropout(0.1)), id="a number without parameters"),
        pytest.param(lambda m: m[0].requires_grad_(False), id="frozen"),
        pytest.param(lambda m: m.double(), id="another dtype"),
        pytest.param(lambda m: m[0].register_buffer("b", torch.zeros(3)), id="a buffer"),
    ],
)
def test_digest_changes_with_the_model(change: Callable[[nn.Sequential], object]) -> None:
    changed = nested()
    change(changed)
    assert digest(changed) != digest(nested())


def test_digest_changes_with_dropout_rate() -> None:
    assert digest(nn.Sequential(nn.Dropout(0.1))) != digest(nn.Sequential(nn.Dropout(0.2)))


def test_digest_changes_with_layer_names_and_settings() -> None:
    named = [nn.Sequential(OrderedDict({name: nn.Linear(8, 8)})) for name in ("a", "b")]
    assert digest(named[0]) != digest(named[1])
    assert digest(nested(), p=0.1) != digest(nested(), p=0.2)
    assert digest(nested(), p=1, q=2) == digest(nested(), q=2, p=1)


_WITH_A_FUNCTION = """
import torch
from torch import nn
from planner.model.chain import chain_digest, chain_of
class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def extra_repr(self):
        return str(self.function)
junk = [object() for _ in range({junk})]
print(chain_digest(chain_of(nn.Sequential(Apply(lambda x: x))), {{}}))
"""


@pytest.mark.slow
def test_digest_contains_no_memory_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer whose repr shows a function has the same digest in the next process."""
    exec(_WITH_A_FUNCTION.format(junk=0), {})
    code = _WITH_A_FUNCTION.format(junk=200_000)
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == capsys.readouterr().out != ""


def test_digest_ignores_ranges_of_quantization_observers() -> None:
    """Their repr shows the ranges seen so far: `inf` at first, and nothing on the meta device."""

    class Observed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.observer = torch.ao.quantization.MinMaxObserver(quant_min=0, quant_max=127)

    with torch.device("meta"):
        empty = nn.Sequential(Observed(), Observed())
    assert chain_digest(chain_of(empty), {}) == chain_digest(chain_of(nn.Sequential(Observed(), Observed())), {})


def test_digest_ignores_where_a_dict_of_parameters_is() -> None:
    """Its repr names `torch.meta.FloatTensor` on the meta device."""

    class Named(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.gains = nn.ParameterDict({"first": nn.Parameter(torch.ones(4))})

    with torch.device("meta"):
        empty = nn.Sequential(Named(), Named())
    assert chain_digest(chain_of(empty), {}) == chain_digest(chain_of(nn.Sequential(Named(), Named())), {})


class Adapted(nn.Module):
    """Two layers whose forwards refer to parameters of the model in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.adapters = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            layer.forward = partial(self._adapted, layer.forward, adapter)  # type: ignore[method-assign]

    @staticmethod
    def _adapted(forward: Callable[[Tensor], Tensor], adapter: Tensor, value: Tensor) -> Tensor:
        return forward(value) * adapter

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


def test_parameters_in_closures_belong_to_the_layers_that_read_them() -> None:
    with torch.device("meta"):
        empty = Adapted()
    for model in (Adapted(), empty):
        chain = chain_of(model, lambda size: torch.ones(size, 4))
        read = [[name for name in layer.parameters_by_name() if "adapters" in name] for layer in chain.layers]
        assert read == [["adapters.0"], ["adapters.1"]]


class TeacherForced(nn.Module):
    """Decoder that feeds its output or a given value back, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, value: Tensor, given: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(given if random.random() < 0.5 else value)
        return value


def test_digest_does_not_depend_on_the_state_of_pythons_generator() -> None:
    digests, states = set(), []
    for seed in range(6):
        random.seed(seed)
        states.append(random.getstate())
        digests.add(
            chain_digest(chain_of(TeacherForced(), lambda size: (torch.ones(size, 4), torch.ones(size, 4))), {})
        )
        assert random.getstate() == states[-1]
    assert len(digests) == 1
