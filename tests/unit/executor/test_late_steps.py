"""Tests that the equivalence check finds code that changes its behavior after some calls, or in few of them."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8

SCALE = {"value": 1.0, "calls": 0}


class Layer(nn.Module):
    """Linear layer whose output a function scales."""

    def __init__(self, scale: Callable[["Layer", Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.scale, self.calls = nn.Linear(WIDTH, WIDTH), scale, 0
        self.scales = itertools.cycle([1.0] * 12 + [0.2] * 12)

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(value)) * self.scale(self, value)


def changes_at_the_tenth_call(layer: Layer, _value: Tensor) -> float:
    """Change, once, the value that another layer reads."""
    if layer.calls == 10:
        SCALE["value"] = 0.3
    return 1.0


def changes_for_large_values(_layer: Layer, value: Tensor) -> float:
    """Change, in few batches, the value that another layer reads."""
    if value.abs().max() > 2.6:
        SCALE["value"] *= 0.9
    return 1.0


def read(_layer: Layer, _value: Tensor) -> float:
    """Return the value that another layer changes."""
    return SCALE["value"]


def cycled(layer: Layer, _value: Tensor) -> float:
    """Return the next number of an iterator, whose state is not visible."""
    return next(layer.scales)


def if_trained(_layer: Layer, value: Tensor) -> float:
    """Return a scale that depends on whether the input requires a gradient."""
    return 0.5 if value.requires_grad else 1.0


def checked(*scales: Callable[[Layer, Tensor], Any]) -> EquivalenceResult:
    """Check a model of these layers, with a linear layer after each."""
    SCALE["value"] = 1.0

    def build() -> nn.Module:
        return nn.Sequential(*(part for scale in scales for part in (Layer(scale), nn.Linear(WIDTH, WIDTH))))

    return check_equivalence(loaded_model(build, WIDTH, loss_fn=lambda out, _: out.square().mean()), budget_s=60)


@pytest.mark.slow
@pytest.mark.usefixtures("late_steps")
def test_layers_that_later_share_a_value_stay_in_one_stage() -> None:
    """Two steps have four calls; the tenth is in step 5."""
    found = checked(changes_at_the_tenth_call, read)
    assert found.loaded.uncut == ("0", "1")
    assert " in step " in found.warnings[0]
    # The first forward of a recomputed stage and its second one may read different values.
    assert 'the module-level number "SCALE.value", which `forward` changes, in step' in found.proof.differs_recomputed


@pytest.mark.slow
@pytest.mark.usefixtures("late_steps")
def test_a_layer_with_hidden_state_is_not_recomputed() -> None:
    """The twelfth call shows that its iterator runs twice as fast."""
    found = checked(cycled, cycled)
    assert (found.warnings, found.proof.cuts) == ((), 3)
    assert "in step" in found.proof.differs_recomputed


class TwoParts(nn.Module):
    """Has a part whose output only the first losses read."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        side = torch.tanh(self.side(value))
        return self.out(torch.tanh(self.main(value))), side


@pytest.mark.slow
@pytest.mark.usefixtures("late_steps")
def test_parts_that_lose_their_gradient_later_are_refused() -> None:
    """A stage gets zeros, with which the optimizer updates weights that a plain loop does not."""
    SCALE["calls"] = 0

    def loss_fn(out: tuple[Tensor, Tensor], _target: Tensor) -> Tensor:
        SCALE["calls"] += 1
        return out[0].square().mean() + (out[1].mean() if SCALE["calls"] <= 8 else 0.0)

    with pytest.raises(ModelError, match=r'"side.\w+" in step'):
        check_equivalence(loaded_model(TwoParts, WIDTH, loss_fn=loss_fn, build_optimizer=decaying), budget_s=60)


def decaying(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that shrinks every parameter that has a gradient."""
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5, momentum=0.9)


def test_a_module_level_value_that_few_batches_change_is_refused() -> None:
    """Two steps rarely show it, 64 forwards nearly always."""
    with pytest.raises(ModelError, match=r'changes the module-level value "SCALE.value" in its call') as refused:
        checked(changes_for_large_values, read)
    assert "buffers" in refused.value.hint


def test_layers_that_return_another_dtype_later_are_refused() -> None:
    def narrower(layer: Layer, value: Tensor) -> Tensor:
        return torch.ones(len(value), WIDTH, dtype=torch.float64 if layer.calls > 20 else torch.float32)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(narrower), Casts(), nn.Linear(WIDTH, WIDTH))

    with pytest.raises(ModelError, match=r"returns float64\[2, 8\] in forward \d+, and float32\[2, 8\] in the first"):
        check_equivalence(loaded_model(build, WIDTH), budget_s=60)


class Casts(nn.Module):
    """Accepts any dtype."""

    def forward(self, value: Tensor) -> Tensor:
        return value.float()


@pytest.mark.slow
def test_layers_that_read_requires_grad_are_not_recomputed() -> None:
    """Single layers do not show it: only the second layer of a stage gets an input without gradient."""
    found = checked(if_trained, if_trained)
    assert (found.warnings, found.proof.cuts) == ((), 3)
    assert "where no gradients are computed" in found.proof.differs_recomputed


class Flags(nn.Module):
    """Returns True if its input has a large value."""

    def forward(self, value: Tensor) -> tuple[Tensor, bool]:
        return value, bool(value.detach().abs().max() > 50)


class Clips(nn.Module):
    """Clips its input if it has a large value."""

    def forward(self, pair: tuple[Tensor, bool]) -> Tensor:
        return pair[0].clamp(-1, 1) if pair[1] else pair[0]


def test_layers_that_return_a_value_dependent_flag_are_refused() -> None:
    """The next stage would always use the flag of the first forward."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Flags(), Clips(), nn.Linear(WIDTH, WIDTH))

    with pytest.raises(ModelError, match="returns the Python number False"):
        check_equivalence(loaded_model(build, WIDTH), budget_s=60)
