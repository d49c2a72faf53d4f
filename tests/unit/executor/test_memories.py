"""The equivalence check counts tensors that a model keeps in lists, although forwards read them only much later."""

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8
FULL = 1000
BANK: deque[Tensor] = deque(maxlen=FULL)
CENTER: dict[str, Tensor | None] = {"value": None}
LEFT: dict[str, Tensor] = {}


class Memory(nn.Module):
    """Keeps the mean of each micro-batch, and reads the memory when it is full."""

    def __init__(self, bank: list[Tensor] | deque[Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        if bank is not None:
            self.bank = bank

    def forward(self, x: Tensor) -> Tensor:
        bank = getattr(self, "bank", BANK)
        x = torch.tanh(self.layer(x))
        if len(bank) == FULL:
            x = x + torch.stack(list(bank)).mean(0)
        bank.append(x.detach().mean(0))
        return x


class MadeLater(Memory):
    """Makes the list in the first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "bank"):
            self.bank = []
        return super().forward(x)


class Called(nn.Module):
    """Calls its layers, so that stages delete tensors which layers leave in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = MadeLater(), Memory([])

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))  # type: ignore[no-any-return]


class Centered(nn.Module):
    """Keeps an average of all layers in a module-level tensor, and reads it after many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        self.calls += 1
        mean, before = x.detach().mean(0), CENTER["value"]
        CENTER["value"] = mean if before is None else 0.9 * before + 0.1 * mean
        return x + CENTER["value"] if self.calls > FULL else x


class Leaves(nn.Linear):
    """Leaves its last result in a module-level dict."""

    def forward(self, x: Tensor) -> Tensor:
        LEFT["last"] = super().forward(x)
        return torch.tanh(LEFT["last"])


def checked(*layers: nn.Module) -> EquivalenceResult:
    loaded = loaded_model(lambda: nn.Sequential(*layers), WIDTH, loss_fn=lambda out, _: out.square().mean())
    return check_equivalence(loaded, budget_s=60.0)


@pytest.mark.slow
def test_a_memory_of_one_layer_is_not_recomputed() -> None:
    found = checked(Memory(deque(maxlen=FULL)), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert (found.proof.cuts, found.warnings) == (2, ())
    assert 'the number of tensors in "0.bank"' in found.proof.differs_recomputed


@pytest.mark.slow
def test_layers_with_a_module_level_memory_stay_in_one_stage() -> None:
    found = checked(nn.Linear(WIDTH, WIDTH), Memory(), Memory())
    assert found.loaded.uncut == ("1",)
    assert 'the number of tensors in "BANK"' in found.warnings[0]


@pytest.mark.slow
def test_a_memory_in_a_list_of_a_called_module_is_refused() -> None:
    loaded = loaded_model(Called, WIDTH, loss_fn=lambda out, _: out.square().mean())
    with pytest.raises(ModelError, match=r'the number of tensors in "one\.bank" differs'):
        check_equivalence(loaded, budget_s=60.0)


@pytest.mark.slow
def test_a_module_level_average_is_found_before_forwards_read_it() -> None:
    with pytest.raises(ModelError, match=r'changes the module-level value "CENTER\.value" in its call 2'):
        checked(nn.Linear(WIDTH, WIDTH), Centered(), Centered(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.slow
def test_results_left_in_a_module_level_dict_are_allowed() -> None:
    assert checked(*(Leaves(WIDTH, WIDTH) for _ in range(3))).proof.cuts == 2
