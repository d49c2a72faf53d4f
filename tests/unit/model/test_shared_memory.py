"""Tensors that share memory across layers are refused if stages on several devices cannot train them alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from planner.core.errors import ModelError
from planner.profile.structure import find_chain
from tests.support.measure import loaded_model, profile_of_model


class Product(nn.Module):
    """A layer around a weight that the caller made."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight


def by_data() -> nn.Module:
    """Return a model whose head is tied by `.data`."""
    first, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight.data = first.weight.data
    return nn.Sequential(first, nn.ReLU(), head)


def by_values() -> nn.Module:
    """Return a model of which two parameters are made of one tensor."""
    values = torch.randn(4, 4)
    return nn.Sequential(Product(nn.Parameter(values)), nn.ReLU(), Product(nn.Parameter(values)))


def by_view() -> nn.Module:
    """Return a model of which one parameter is a part of another."""
    first, head = nn.Linear(4, 4), nn.Linear(4, 2)
    head.weight = nn.Parameter(first.weight.data[:2])
    return nn.Sequential(first, nn.ReLU(), head)


def by_frozen() -> nn.Module:
    """Return a model whose frozen head follows a trained weight."""
    model = by_data()
    model[2].weight.requires_grad_(False)
    return model


def by_buffer() -> nn.Module:
    """Return a model of which a buffer follows the weight of another layer."""
    first, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.register_buffer("weight_of_first", first.weight.data)
    return nn.Sequential(first, nn.ReLU(), head)


@pytest.mark.parametrize("build", [by_data, by_values, by_view, by_frozen, by_buffer])
def test_two_trained_tensors_in_one_memory_are_refused(build: Callable[[], nn.Module]) -> None:
    """A plain loop steps that memory once for each tensor; two devices have two memories."""
    with pytest.raises(
        ModelError, match=r'"0\.weight" and "2\.weight.*" are two tensors in the same memory'
    ) as refused:
        chain_names(build)
    assert "head.weight = embedding.weight" in refused.value.hint


def test_frozen_parameters_may_share_memory() -> None:
    model = by_data()
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    assert chain_names(lambda: model) == ("0", "1", "2")


def test_disjoint_views_of_one_storage_are_not_tied() -> None:
    """`vector_to_parameters` makes such views."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
        return model

    measured = profile_of_model(loaded_model(build, lambda n: torch.randn(n, 4)), sizes=(1,))
    assert [layer.tied for layer in measured.layers] == [(), ()]


# Hooks


def chain_names(build: Callable[[], nn.Module], **options: Any) -> tuple[str, ...]:
    """Return the names of the layers that `profile` finds."""
    loaded = replace(loaded_model(build, lambda n: torch.randn(n, 4)), **options)
    return find_chain(loaded, torch.device("cpu"))[0].names


@pytest.mark.parametrize("register", [Tensor.register_hook, nn.Parameter.register_post_accumulate_grad_hook])
@pytest.mark.parametrize("precision", ["", "bf16", "fp16-mixed"])
def test_hooks_are_refused_on_tied_weights(register: Callable[..., object], precision: str) -> None:
    """Each stage would call them with the gradient of its own layers."""

    def build() -> nn.Module:
        weight = nn.Parameter(torch.randn(4, 4))
        register(weight, lambda _: None)
        return nn.Sequential(Product(weight), nn.ReLU(), Product(weight))

    with pytest.raises(ModelError, match=r'"0\.weight", a parameter of the layers "0", "2", has a hook'):
        chain_names(build, precision=precision)


def test_hooks_on_weights_of_one_layer_are_accepted() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.register_hook(lambda g: g.clamp(-1, 1))
        return model

    assert chain_names(build) == ("0", "1")
