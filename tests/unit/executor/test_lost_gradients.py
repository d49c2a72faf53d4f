"""Test of layers that begin or cease to compute gradients late."""

from pathlib import Path

import pytest

from planner.core.values.plan import Recompute
from tests.support.ranks import end_ranks
from tests.support.training import Case, write_balance
from tests.unit.executor.test_shared_values import WORKER

MODEL = """
import torch
from torch import nn

class Layer(nn.Linear):
    # If `last` is negative, the layer detaches its result at first; else it detaches its input later.
    calls = 0

    def __init__(self, last):
        super().__init__(4, 4)
        self.last = last

    def forward(self, x):
        self.calls += 1
        if self.last < 0:
            result = super().forward(x)
            return result.detach() if self.calls <= -self.last else result
        return super().forward(x.detach() if self.calls > self.last else x)

def build_model(last: int = 0):
    return nn.Sequential(nn.Linear(4, 4), Layer(last), nn.Linear(4, 4))

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


def output_of(folder: Path, last: int, *, balance: tuple[int, int] = (1, 2), recompute: Recompute = "never") -> str:
    """Return what two ranks print whose layer 1 changes what it detaches after `last` of its 16 forwards."""
    (folder / "model.py").write_text(MODEL)
    (folder / "worker.py").write_text(WORKER)
    settings = (("last", last),)
    case = Case(model=folder / "model.py", balance=balance, recompute=recompute, settings=settings)
    write_balance(case, folder / "balance.yaml")
    return end_ranks(2, ["worker.py"], folder).output


def test_a_step_without_gradients_for_earlier_stages_ends_the_run(tmp_path: Path) -> None:
    output = output_of(tmp_path, 8)
    assert "no gradient reaches the stages before stage 1" in output
    assert "step 1: loss" in output


def test_some_micro_batches_may_have_no_gradients(tmp_path: Path) -> None:
    assert "no gradient reaches" not in output_of(tmp_path, 15)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_an_output_that_requires_a_gradient_late_ends_the_run(tmp_path: Path, recompute: Recompute) -> None:
    output = output_of(tmp_path, -8, balance=(2, 1), recompute=recompute)
    assert "a tensor that a stage sends requires a gradient now, but did not before" in output
    assert "step 1: loss" in output
