"""Tests of loss scaling."""

import pytest
import torch
from torch import nn

from planner.executor.run import loss_scale
from planner.executor.run.loss_scale import LossScale

FIRST = 2.0**16


pytestmark = pytest.mark.usefixtures("one_rank")


def scaled(*gradients: float, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], LossScale]:
    """Return parameters with these gradients times the scale, and one without gradient."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(len(gradients) + 1)]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = torch.full_like(parameter, gradient * FIRST)
    return parameters, LossScale(parameters, torch.device("cpu"))


def test_gradients_are_divided_by_the_scale() -> None:
    """Exactly, because it is a power of two."""
    parameters, scale = scaled(0.1, -7.0)
    assert scale.value == FIRST
    assert scale.unscale_and_update()
    assert [p.grad is None for p in parameters] == [False, False, True]
    assert torch.equal(parameters[0].grad, torch.full((3,), 0.1))
    assert torch.equal(parameters[1].grad, torch.full((3,), -7.0))
    assert scale.value == FIRST


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_skips_the_step_and_halves_the_scale(bad: float) -> None:
    """Not even weight decay changes a parameter."""
    parameters, scale = scaled(1.0, bad)
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.5)
    before = [p.detach().clone() for p in parameters]
    assert not scale.unscale_and_update()
    optimizer.step()
    assert all(p.grad is None for p in parameters)
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert not optimizer.state
    assert scale.value == FIRST / 2


def test_consecutive_good_steps_double_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_GOOD_STEPS", 3)
    parameters, scale = scaled(1.0)
    values = []
    for step in range(8):
        parameters[0].grad = torch.full((3,), float("inf") if step == 1 else 1.0)
        scale.unscale_and_update()
        values.append(scale.value / FIRST)
    assert values == [1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0]
