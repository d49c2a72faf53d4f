"""Tests of the loss that the last stage sends to all ranks with its last gradients."""

from pathlib import Path

from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

WORKER = """
from datetime import timedelta

from planner.executor import Pipeline
from planner.executor.run.engine import Engine
from planner.executor.watch.store import job_store

run_weight_backward = Engine._weight_backward
pipeline = Pipeline("balance.yaml")
store = job_store(timedelta(seconds=60))

def weight_backward(self, action):
    if pipeline.rank == 1 and action.is_last:
        store.wait(["rank 0 has the loss"], timedelta(seconds=20))
    run_weight_backward(self, action)

Engine._weight_backward = weight_backward
optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
for inputs, targets in pipeline.batches(1):
    with pipeline.step(inputs, targets) as loss:
        store.set("rank 0 has the loss", "")
        optimizer.step()
    print("loss", loss)
"""


def test_the_first_device_has_the_loss_before_the_last_weight_pass_of_the_last_device(tmp_path: Path) -> None:
    """Otherwise two steps of a schedule with split backward could not overlap."""
    case = Case(model=ROOT / "sample_models/mlp.py", balance=(8, 9), schedule="zb-h1")
    write_balance(case, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(WORKER)
    losses = [line for line in run_ranks(2, ["worker.py"], tmp_path).splitlines() if line.startswith("loss")]
    assert len(losses) == 2
    assert losses[0] == losses[1]
