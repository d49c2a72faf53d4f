"""Tests of values that every rank of a pipeline knows."""

import json
from pathlib import Path

import pytest

from tests.support.processes import write_script
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

pytestmark = pytest.mark.slow

MISCHIEF = ROOT / "tests/zoo/models/mischief.py"

PLATEAU = """
import json
import os
import torch
import torch.distributed as dist
from planner.executor import Pipeline

dist.init_process_group("gloo")
pipeline = Pipeline("balance.yaml", seed=3)
optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
losses, rates = [], []
for inputs, targets in pipeline.batches(7):
    with pipeline.step(inputs, targets) as loss:
        optimizer.step()
        optimizer.zero_grad()
    plateau.step(loss)
    losses.append(loss)
    rates.append(optimizer.param_groups[0]["lr"])
assert losses == pipeline.losses
evaluated = pipeline.evaluate(inputs, targets)

def errors(output, target):
    return {"absolute": (output - target).abs().mean(), "largest": float(output.max())}

batch = pipeline.model.example_batch(11 * pipeline.balance.replicas)
own = pipeline.own_part(*batch)
result = pipeline.evaluate(*own, metrics=errors, outputs=True)
assert (result.outputs is not None) == pipeline.is_last
assert set(result.metrics) == {"absolute", "largest"}
assert pipeline.modules[-1].seen is None
absolute = None if result.outputs is None else float((result.outputs - own[1]).abs().mean())
of_last = [None] * dist.get_world_size()
dist.all_gather_object(of_last, absolute)
of_last = [value for value in of_last if value is not None]
assert abs(result.metrics["absolute"] - sum(of_last) / len(of_last)) < 1e-6
assert result.loss == pipeline.evaluate(*own)
evaluated = [evaluated, result.loss, result.metrics]
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, [losses, rates, evaluated, pipeline.last_step_samples])
if pipeline.rank == 0:
    with open(os.environ["RESULT"], "w") as file:
        json.dump(everybody, file)
pipeline.close()
dist.destroy_process_group()
"""

GROUP = """
import os
import threading

import torch.distributed as dist

dist.init_process_group("gloo")
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]

import train

thread = threading.Thread(target=train.main)
thread.start()
thread.join()
assert dist.get_world_size() == 2
dist.destroy_process_group()
"""
"""As in Ray Train: a process group exists already, and the script runs in a thread."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(model=MISCHIEF, balance=(1, 1, 2, 1)), marks=pytest.mark.nightly),
        Case(model=MISCHIEF, balance=(1, 1, 1, 2), chunks=2, schedule="interleaved"),
        Case(model=MISCHIEF, balance=(1, 2, 2), replicas=2, micro_batches=2, batch=8, schedule="1f1b"),
    ],
    ids=["four", "interleaved", "replicas"],
)
def test_loss_and_metrics_are_equal_on_every_rank(tmp_path: Path, case: Case) -> None:
    """ReduceLROnPlateau therefore lowers all learning rates in the same step."""
    write_balance(case, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(PLATEAU)
    run_ranks(case.num_processes, ["worker.py"], tmp_path, DROPOUT="0.5", RESULT="result.json")
    ranks = json.loads((tmp_path / "result.json").read_text())
    assert len(ranks) == case.num_processes
    assert all(rank == ranks[0] for rank in ranks)
    losses, rates, evaluated, samples = ranks[0]
    assert len(set(losses)) == 7
    assert rates[-1] < rates[0]
    assert 0 < evaluated[2]["absolute"] < evaluated[2]["largest"]
    assert samples == case.batch


def test_an_existing_process_group_is_used(tmp_path: Path) -> None:
    """Losses are bit-for-bit equal, and the group is not destroyed."""
    write_script(Case(model=MISCHIEF, balance=(2, 3), batch=8, micro_batches=4), tmp_path)
    (tmp_path / "group.py").write_text(GROUP)
    for script in ("train.py", "group.py"):
        run_ranks(
            2, (script, "--steps", "3", "--checkpoint", f"{script}.saved", "--report", f"{script}.json"), tmp_path
        )
    plain, within = (json.loads((tmp_path / f"{name}.py.json").read_text())["losses"] for name in ("train", "group"))
    assert within == plain
