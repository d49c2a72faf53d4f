"""Tests of layers that change modules late: their modes, hooks, submodules, frozen parameters and numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.run.replay import LayerState
from tests.support.ranks import end_ranks
from tests.support.training import Case, write_balance
from tests.unit.executor.test_shared_values import WORKER

MODEL = """
import torch
from torch import nn

class Layer(nn.Linear):
    scale, calls = 1.0, 0

    def __init__(self):
        super().__init__(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x)) * self.scale

class Changer(Layer):
    def __init__(self, others, change):
        super().__init__()
        self.others, self.change = others, change

    def forward(self, x):
        self.calls += 1
        if self.calls == 9:
            self.change(*self.others)
        return super().forward(x)

def set_scale(other):
    other.scale = 0.5

def freeze(other):
    other.requires_grad_(False)

def replace(other):
    other.drop = nn.Identity()

def add_hook(other):
    other.register_forward_hook(lambda module, args, result: result * 2)

CHANGES = [nn.Module.eval, set_scale, freeze, replace, add_hook]

def build_model(change: int = 0, own: bool = False):
    layers = [Layer() for _ in range(3)]
    changer = Changer((layers[0 if own else 2],), CHANGES[change])
    return nn.Sequential(layers[0], changer, *layers[1:])

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


def output_of(folder: Path, change: int, *, own: bool = False) -> str:
    """Return what two ranks print whose layer 1 changes another layer in its ninth call, in the third step."""
    (folder / "model.py").write_text(MODEL)
    (folder / "worker.py").write_text(WORKER)
    case = Case(model=folder / "model.py", balance=(2, 2), settings=(("change", change), ("own", own)))
    write_balance(case, folder / "balance.yaml")
    return end_ranks(2, ["worker.py"], folder).output


@pytest.mark.parametrize(
    ("change", "name"),
    [*enumerate(["the mode `training`", "`scale`", "`requires_grad`", "the submodules", "the hooks"])],
)
def test_a_late_change_of_a_module_on_another_rank_ends_the_run(tmp_path: Path, change: int, name: str) -> None:
    assert f'a layer of another rank has changed {name} of "3' in output_of(tmp_path, change)


def test_a_late_change_of_a_module_on_the_same_rank_is_no_error(tmp_path: Path) -> None:
    assert "changed" not in output_of(tmp_path, 3, own=True)


def test_a_parameter_that_a_layer_freezes_late_ends_the_run(tmp_path: Path) -> None:
    assert '`forward` has frozen "0.weight"' in output_of(tmp_path, 2, own=True)


def test_a_recomputation_runs_in_the_mode_of_the_first_forward() -> None:
    layer = nn.Dropout(1.0)
    run = LayerState([("0", layer)]).with_same_state(layer)
    assert not run(torch.ones(1))
    layer.eval()
    assert not run(torch.ones(1))
    assert not layer.training


def _add_hook(layer: nn.Sequential) -> None:
    layer.register_forward_hook(lambda _module, _args, result: result)


def _freeze(layer: nn.Sequential) -> None:
    layer.requires_grad_(False)


def _replace(layer: nn.Sequential) -> None:
    layer[0] = nn.Identity()


def _tie(layer: nn.Sequential) -> None:
    layer[0].weight = nn.Parameter(torch.ones(2, 2))


def _write(layer: nn.Sequential) -> None:
    with torch.no_grad():
        layer[0].weight.zero_()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *[(each, "changed a module's hooks, submodules or trained") for each in (_add_hook, _freeze, _replace, _tie)],
        (_write, "written into trained"),
    ],
)
def test_a_layer_that_has_changed_is_not_recomputed(change: Callable[[nn.Sequential], None], says: str) -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    value: Tensor = torch.ones(1, 2)
    run = LayerState([("0", layer)]).with_same_state(layer)
    run(value)
    change(layer)
    with pytest.raises(ModelError, match=f"`forward` has {says} parameters"):
        run(value)


def test_a_layer_that_writes_its_weight_in_every_forward_is_recomputed() -> None:
    layer = nn.Embedding(4, 2, max_norm=0.5)
    rows = torch.arange(4)
    state = LayerState([("0", layer)])
    first, second = state.with_same_state(layer), state.with_same_state(layer)
    result = first(rows)
    second(rows)
    assert torch.equal(first(rows), result)
