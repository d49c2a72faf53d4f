"""Tests of models whose backward reads or writes tensors of modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8


def checked(build: type[nn.Module]) -> EquivalenceResult:
    """Return the result of the check of a model."""
    return check_equivalence(loaded_model(build, WIDTH, loss_fn=lambda out, _target: out.square().mean()), budget_s=60)


class Scale(torch.autograd.Function):
    """Identity whose backward divides by a running norm of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, norm: Tensor) -> Tensor:
        ctx.norm = norm
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.norm.mul_(0.9).add_(0.1 * gradient.norm())
        return gradient / (1 + ctx.norm), None


class ScaleLayer(nn.Module):
    """Layer with the running norm of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("norm", torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(Scale.apply(self.linear(value), self.norm))


class Scaling(nn.Module):
    """Layers that scale their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaleLayer() for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


class BetweenLayers(Scaling):
    """Layers between which the model's own code scales the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("norm", torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(Scale.apply(value, self.norm))
        return value


@pytest.mark.slow
def test_layers_whose_backward_writes_a_buffer_are_not_recomputed() -> None:
    """A recomputation reads the buffer's value of the first forward, and its backward would write a copy."""
    found = checked(Scaling)
    assert (found.warnings, found.proof.cuts) == ((), 2)
    assert found.proof.differs_recomputed == 'a backward changes "layers.0.norm"'


@pytest.mark.slow
def test_a_backward_that_reads_a_tensor_of_another_stage_is_refused() -> None:
    """Its gradient has no values, so no stage could send it."""
    with pytest.raises(ModelError, match='a backward reads "norm", which this stage does not have') as refused:
        checked(BetweenLayers)
    assert "be in a module that has the tensor" in refused.value.hint
