"""Backwards that run code of the model: hooks and autograd functions may read what a later forward has replaced."""

import cProfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence.check import check_equivalence
from planner.model.backward_code import record_called_functions
from tests.support.measure import loaded_model

WIDTH = 8


class Scale(torch.autograd.Function):
    """Reads the attribute `scale` of a module in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        owner.scale = x.detach().abs().max()
        ctx.owner = owner
        return x / owner.scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.owner.scale, None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.owner = [type("Owner", (), {})()]

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(self.layer(x), self.owner[0])  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.slow
def test_attributes_read_in_backward_are_detected_although_a_recomputation_sets_them_again() -> None:
    loaded = loaded_model(
        lambda: nn.Sequential(*(Scaled() for _ in range(4))), WIDTH, loss_fn=lambda out, _: out.square().mean()
    )
    with pytest.raises(ModelError, match="stages do not train as it does in a plain loop"):
        check_equivalence(loaded, budget_s=60.0)


def test_hooks_and_autograd_functions_are_code_of_the_model() -> None:
    def functions(x: Tensor) -> list[str]:
        found: list[str] = []
        with record_called_functions(found):
            x.sum().backward()
        return found

    x = torch.ones(2, requires_grad=True)
    hooked = x * 2
    hooked.register_hook(lambda gradient: gradient)
    assert functions(nn.Linear(2, 2)(x)) == []
    assert functions(hooked) == ["<lambda>"]
    assert functions(Scale.apply(x, Scaled())) == ["backward"]  # type: ignore[no-untyped-call]


def test_a_profiler_may_run_during_the_backward() -> None:
    functions = list[str]()
    with cProfile.Profile(), record_called_functions(functions):
        _called()
    assert functions == ["_called"]


def _called() -> None: ...
