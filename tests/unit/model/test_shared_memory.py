"""Tensors that several layers hold: what stages on several devices cannot train alike is refused."""

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
        """Return the product."""
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
def test_two_tensors_in_one_memory_are_refused(build: Callable[[], nn.Module]) -> None:
    """A plain loop steps that memory once for each; on two devices there are two memories."""
    with pytest.raises(
        ModelError, match=r'"0\.weight" and "2\.weight.*" are two tensors in the same memory'
    ) as refused:
        chain_names(build)
    assert "head.weight = embedding.weight" in refused.value.hint


def test_frozen_parameters_may_share_memory() -> None:
    """Nothing changes them, so that copies stay equal."""
    model = by_data()
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    assert chain_names(lambda: model) == ("0", "1", "2")


def test_parts_of_one_storage_are_parameters_of_their_own() -> None:
    """`vector_to_parameters` makes them views of one vector, which no update of another one reaches."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
        return model

    measured = profile_of_model(loaded_model(build, lambda n: torch.randn(n, 4)), sizes=(1,))
    assert [layer.tied for layer in measured.layers] == [(), ()]


# Hooks


def hooked(hook: Callable[[Tensor], Tensor | None]) -> nn.Module:
    """Return a model with a tied weight whose gradient goes through a hook."""
    weight = nn.Parameter(torch.randn(4, 4))
    model = nn.Sequential(Product(weight), nn.ReLU(), Product(weight))
    weight.register_hook(hook)
    return model


def chain_names(build: Callable[[], nn.Module], **options: Any) -> tuple[str, ...]:
    """Return the names of the layers that `profile` finds."""
    loaded = replace(loaded_model(build, lambda n: torch.randn(n, 4)), **options)
    return find_chain(loaded, torch.device("cpu"))[0].names


def test_autograd_calls_a_hook_once_per_micro_batch_with_the_sum_of_all_uses() -> None:
    """Stages must give what this gives: it is what makes hooks that are not additive differ."""
    seen: list[Tensor] = []
    model = hooked(lambda gradient: seen.append(gradient.clone()))
    weight = model[0].weight
    parts = []
    for _ in range(2):
        value = torch.randn(3, 4)
        apart = [weight.detach().clone().requires_grad_() for _ in range(2)]
        model(value).sum().backward()
        (torch.relu(value @ apart[0]) @ apart[1]).sum().backward()
        parts.append(apart[0].grad + apart[1].grad)
    torch.testing.assert_close(seen, parts)
    torch.testing.assert_close(weight.grad, parts[0] + parts[1])


def clamped_in_place(gradient: Tensor) -> None:
    """Change a gradient as torch's documentation says that hooks should not."""
    gradient.clamp_(-1000, 1000)


@pytest.mark.parametrize("precision", ["", "bf16", "fp16-mixed"])
@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g.clamp(-1, 1),
        clamped_in_place,
        lambda g: g / g.norm(),
        lambda g: g + 0.01,
        lambda g: g + 0.1 * torch.randn_like(g),
        lambda g: g.no_such_method(),
    ],
)
def test_hooks_that_are_not_additive_are_refused_on_tied_weights(
    hook: Callable[[Tensor], Tensor | None], precision: str
) -> None:
    """Each stage would clamp the gradient of its own layers."""
    with pytest.raises(ModelError, match=r'a hook on "0\.weight", a parameter of the layers "0", "2", is not additive'):
        chain_names(lambda: hooked(hook), precision=precision)


def test_hooks_after_accumulation_are_refused_on_tied_weights() -> None:
    """Other stages have added nothing by then."""

    def build() -> nn.Module:
        model = hooked(lambda g: g)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        return model

    with pytest.raises(ModelError, match="a hook on"):
        chain_names(build)


def test_additive_hooks_are_taken() -> None:
    """A mask, a factor, and what only looks."""
    mask = torch.ones(4, 4).tril()
    for hook in (lambda g: g * mask, lambda g: -0.5 * g, lambda _: None):
        assert chain_names(lambda hook=hook: hooked(hook)) == ("0", "1", "2")


def test_any_hook_is_taken_on_a_weight_of_one_layer() -> None:
    """Its stage has the whole gradient of each micro-batch."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.register_hook(lambda g: g.clamp(-1, 1))
        return model

    assert chain_names(build) == ("0", "1")
