"""Tests of checkpoints that take longer than the time limit of a transfer."""

from pathlib import Path

import pytest

from tests.support.clocks import is_within
from tests.support.processes import Job
from tests.support.training import ROOT, Case, write_balance

pytestmark = pytest.mark.slow

TWO = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(2, 3))

SLOW = """
import sys, time
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import writing
from planner.executor.watch.failure import FailureWatch

class Slow(writing._CountedFile):
    left = 5

    def write(self, data):
        if Slow.left:
            time.sleep(float(sys.argv[1]))
        Slow.left = max(0, Slow.left - 1)
        return super().write(memoryview(data)[:500])

with FailureWatch(2.0) as watch:
    pipeline = Pipeline("balance.yaml", watch=watch, timeout_s=2.0)
    if pipeline.rank == 0:
        writing._CountedFile = Slow
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    saved = Checkpoints(pipeline, optimizer, folder="saved", steps=1)
    saved._is_async = sys.argv[2] == "thread"
    for inputs, targets in pipeline.batches(1):
        with pipeline.step(inputs, targets):
            optimizer.step()
        saved.step_done()
    pipeline.close()
"""


@pytest.mark.parametrize("how", ["here", "thread"])
def test_a_checkpoint_may_take_longer_than_the_time_limit(tmp_path: Path, how: str) -> None:
    """Other ranks do not take the job for hanging."""
    write_balance(TWO, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(SLOW)
    with Job(2, ["worker.py", "1.0", how], tmp_path) as job:
        done = job.ended()
    assert done.codes == (0, 0), done.err
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-00000001"]


def test_a_hanging_disk_is_reported_with_its_stage(tmp_path: Path) -> None:
    """No bytes are written."""
    write_balance(TWO, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(SLOW)
    with Job(2, ["worker.py", "60", "here"], tmp_path) as job:
        done = job.ended()
    assert done.codes == (2, 2), done
    (error,) = done.errors
    assert "stage 0 (layers 0 to 1) has been in writing a checkpoint of step 0 for " in error


KILLED = """
import os, signal
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import writing
from planner.executor.watch.failure import FailureWatch

class Deadly(writing._CountedFile):
    def write(self, data):
        os.kill(os.getpid(), signal.SIGKILL)

with FailureWatch(60.0) as watch:
    pipeline = Pipeline("balance.yaml", watch=watch, timeout_s=60.0)
    if pipeline.rank == 1:
        writing._CountedFile = Deadly
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    saved = Checkpoints(pipeline, optimizer, folder="saved", steps=1)
    for inputs, targets in pipeline.batches(1):
        with pipeline.step(inputs, targets):
            optimizer.step()
        saved.step_done()
    pipeline.close()
"""


@pytest.mark.timed
def test_a_rank_that_is_killed_while_it_writes_is_found_before_the_time_limit(tmp_path: Path) -> None:
    """Other ranks wait in the store, where no connection to it breaks."""
    write_balance(TWO, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(KILLED)
    with Job(2, ["worker.py"], tmp_path) as job:
        done = job.ended()
    assert done.codes == (2, -9), done.err
    assert is_within(done.seconds, 20)
    (error,) = done.errors
    assert "stage 1 (layers 2 to 4) gives no sign of life while stage 0 (layers 0 to 1) waited in a checkpoint" in error
