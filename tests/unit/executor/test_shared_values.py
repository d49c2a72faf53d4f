"""Tests of values that layers on several ranks share, and that a layer changes after the steps of `profile`."""

from pathlib import Path

import pytest

from tests.support.ranks import end_ranks, run_ranks
from tests.support.training import Case, write_balance

MODEL = """
from types import SimpleNamespace
import torch
from torch import nn

PHASE = {"scale": 1.0}
TABLES = {}
SHARED = SimpleNamespace(scale=1.0)

class Layer(nn.Linear):
    scale, calls = 1.0, 0

    def __init__(self, index, change):
        super().__init__(4, 4)
        self.index, self.change, self.shared = index, change, SHARED

    def forward(self, x):
        # Each rank fills the cache again for the smaller mini-batch.
        table = TABLES.setdefault((self.index, len(x)), torch.full((len(x), 1), 2.0))
        self.calls += 1
        if self.index == 0 and self.calls == 9:
            if self.change == 1:
                PHASE["scale"] = 0.5
            if self.change == 2:
                self.shared.scale = 0.5
            if self.change == 3:
                Layer.scale = 0.5
        return super().forward(x) * table * PHASE["scale"] * self.shared.scale * self.scale

def build_model(change: int = 0):
    return nn.Sequential(*[Layer(index, change) for index in range(4)])

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""

WORKER = """
import torch
from gpipe_plan.executor import arguments, checkpoints, pipeline_script

given = arguments("", steps=4, seed=0)
with pipeline_script("balance.yaml", given) as pipeline:
    optimizer = pipeline.optimizer(lambda ps: torch.optim.SGD(ps, lr=0.01))
    saved = checkpoints(pipeline, given, optimizer)
    for step, (inputs, targets) in enumerate(pipeline.batches(given.steps)):
        size = 5 if step == 3 else 8
        with pipeline.step(inputs[:size], targets[:size]) as loss:
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: loss {loss:.6f}", flush=True)
        saved.step_done()
"""


def write(folder: Path, change: int) -> None:
    """Write the model, a plan of two stages, and the script."""
    (folder / "model.py").write_text(MODEL)
    (folder / "worker.py").write_text(WORKER)
    case = Case(model=folder / "model.py", balance=(2, 2), settings=(("change", change),))
    write_balance(case, folder / "balance.yaml")


@pytest.mark.parametrize(("change", "name"), [(1, "PHASE.scale"), (2, "0.shared.scale"), (3, "Layer.scale")])
def test_a_late_change_of_a_value_that_other_ranks_read_ends_the_run(tmp_path: Path, change: int, name: str) -> None:
    """The ninth call is in the third step."""
    write(tmp_path, change)
    ended = end_ranks(2, ["worker.py"], tmp_path)
    assert ended.codes == (2, 2)
    assert f'a layer has changed "{name}" after the first step' in ended.output
    assert "step 3: loss" in ended.output


def test_a_checkpoint_is_not_written_after_such_a_change(tmp_path: Path) -> None:
    write(tmp_path, 1)
    options = "--checkpoint=checkpoints", "--checkpoint-every=2"
    ended = end_ranks(2, ["worker.py", *options], tmp_path)
    assert 'a layer has changed "PHASE.scale" after the first step' in ended.output
    assert "warning: the checkpoint of step 4 is not written; step-00000002 remains the latest" in ended.output
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_caches_may_have_other_entries_on_each_rank(tmp_path: Path) -> None:
    write(tmp_path, 0)
    assert "step 3: loss" in run_ranks(2, ["worker.py"], tmp_path)
