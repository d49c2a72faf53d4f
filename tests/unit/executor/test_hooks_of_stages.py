"""Tests that hooks and functions of stages read the same tensors as in the whole model."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from planner.executor.build.building import StageRange, build_stages, build_structure
from planner.executor.build.own_stage import build_with_values
from planner.model.closures import other_reachable_tensors
from tests.support.measure import loaded_model

WIDTH, SEED = 4, 3
CPU = torch.device("cpu")


class Scale:
    """Hook that is an object."""

    def __init__(self) -> None:
        self.factors = {"weight": [torch.rand(WIDTH, WIDTH)]}

    def after(self, parameter: Tensor) -> None:
        """Scale an accumulated gradient."""
        parameter.grad.mul_(self.factors["weight"][0])


def scale(gradient: Tensor, by: Tensor) -> Tensor:
    """Scale a gradient; used as a hook that is bound to the tensor `by`."""
    return gradient * by


class Masked(nn.Module):
    """Layer that calls a function it was given."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return self.function(self.linear(value))


class Blocks(nn.Module):
    """The same layers in a module with its own forward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


def hooked() -> nn.Sequential:
    """Return a model whose hooks and function read tensors in closures, bound arguments and objects."""
    mask, other, third = torch.rand(3, WIDTH)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Masked(lambda value: value * third))
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    model[1].weight.register_hook(partial(scale, by=torch.rand(WIDTH)))
    model[2].weight.register_post_accumulate_grad_hook(Scale().after)
    model[3].register_forward_hook(lambda _module, _arguments, output: output * other)
    return model


def test_gradients_of_hooks_that_read_tensors_equal_the_models() -> None:
    check_gradients_are_finite(hooked)


def test_gradients_of_functions_that_read_tensors_equal_the_models() -> None:
    """Without hooks, the layers of a Sequential run as they are."""

    def build() -> nn.Sequential:
        factor = torch.rand(WIDTH)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Masked(lambda value: value * factor))

    check_gradients_are_finite(build)


def test_gradients_of_hooks_equal_the_models_outside_of_a_sequential() -> None:
    check_gradients_are_finite(lambda: Blocks(hooked()))


def check_gradients_are_finite(build: Callable[[], nn.Module]) -> None:
    """Compare gradients of two separately built stages with those of the whole model."""
    loaded = loaded_model(build, lambda size: torch.ones(size, WIDTH))
    chain, inputs = build_structure(loaded), torch.randn(2, WIDTH)
    torch.manual_seed(SEED)
    whole = build()
    whole(inputs).sum().backward()
    value: Tensor | tuple[Tensor, ...] = inputs
    gradients = {}
    ranges = [StageRange(0, 2), StageRange(2, len(chain.layers))]
    stages = [build_stages(loaded, chain, [one], seed=SEED, device=CPU)[0] for one in ranges]
    for layers in stages:
        for layer in layers:
            value = layer.module(value)
    assert isinstance(value, Tensor)
    value.sum().backward()
    for layers in stages:
        gradients |= {name: p.grad for layer in layers for name, p in layer.parameters_by_name().items()}
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        found = gradients[name]
        assert found is not None, name
        assert gradient is not None, name
        assert torch.equal(found, gradient), name


def test_tensors_of_other_stages_hooks_take_no_memory() -> None:
    def wanted(model: nn.Module) -> list[Tensor]:
        first = model.get_submodule("0")
        return [*first.parameters(), *other_reachable_tensors([first], first.parameters())]

    model = build_with_values(hooked, wanted, seed=SEED)
    assert [tensor.device.type for tensor in wanted(model)] == ["cpu"] * 3
    assert all(parameter.is_meta for parameter in list(model.parameters())[2:])


class Settings(dict[str, Tensor]):
    """Dict with attributes, a common idiom: a missing attribute raises a KeyError."""

    __getattr__ = dict.__getitem__


def test_tensors_are_found_in_objects_whose_missing_attributes_raise_any_error() -> None:
    module = nn.Linear(2, 2)
    module.settings = Settings(mask=torch.zeros(2))
    assert other_reachable_tensors([module], []) == [module.settings["mask"]]
