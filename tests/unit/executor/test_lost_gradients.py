"""Test of layers that detach their input late, so that earlier stages would get zeros instead of no gradients."""

from pathlib import Path

from tests.support.ranks import end_ranks
from tests.support.training import Case, write_balance
from tests.unit.executor.test_shared_values import WORKER

MODEL = """
import torch
from torch import nn

class Layer(nn.Linear):
    calls = 0

    def __init__(self, last):
        super().__init__(4, 4)
        self.last = last

    def forward(self, x):
        self.calls += 1
        return super().forward(x.detach() if self.calls > self.last else x)

def build_model(last: int = 0):
    return nn.Sequential(nn.Linear(4, 4), Layer(last))

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


def output_of(folder: Path, last: int) -> str:
    """Return what two ranks print whose stage 1 detaches its input after so many of its 16 forwards."""
    (folder / "model.py").write_text(MODEL)
    (folder / "worker.py").write_text(WORKER)
    write_balance(Case(model=folder / "model.py", balance=(1, 1), settings=(("last", last),)), folder / "balance.yaml")
    return end_ranks(2, ["worker.py"], folder).output


def test_a_step_without_gradients_for_earlier_stages_ends_the_run(tmp_path: Path) -> None:
    output = output_of(tmp_path, 8)
    assert "no micro-batch of this step has a gradient before stage 1" in output
    assert "step 1: loss" in output


def test_some_micro_batches_may_have_no_gradients(tmp_path: Path) -> None:
    assert "no micro-batch" not in output_of(tmp_path, 15)
