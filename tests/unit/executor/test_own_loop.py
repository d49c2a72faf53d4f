"""Tests of training loops without `pipeline_script`."""

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

TWO = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(2, 3))

ENDS_AT_ONCE = """
import sys, time
from pathlib import Path
from planner.executor import Pipeline, trainer

pipeline = Pipeline("balance.yaml")
if pipeline.rank == 0:
    received = trainer.mean_results
    trainer.mean_results = lambda *values, **more: time.sleep(0.5) or received(*values, **more)
(inputs, targets), = pipeline.batches(1)
if sys.argv[1] == "step":
    with pipeline.step(inputs, targets) as loss:
        pass
    pipeline.close()
else:
    loss = pipeline.evaluate(inputs, targets)
Path(f"loss-{pipeline.rank}").write_text(str(loss))
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_every_rank_has_the_loss_if_the_last_stage_ends_first(tmp_path: Path, call: str) -> None:
    """`close()` after a step, and `evaluate()`, wait until the loss has been sent."""
    write_balance(TWO, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(ENDS_AT_ONCE)
    run_ranks(2, ["worker.py", call], tmp_path)
    losses = [(tmp_path / f"loss-{rank}").read_text() for rank in range(2)]
    assert losses[0] == losses[1]
