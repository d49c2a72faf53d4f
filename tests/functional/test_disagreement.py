"""Tests of jobs in which one rank fails or deviates: all ranks end, and the right stage is named."""

from pathlib import Path

import pytest

from tests.support.clocks import is_within
from tests.support.processes import Ended, Job
from tests.support.training import ROOT, Case, write_balance

pytestmark = pytest.mark.slow

TWO = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(2, 3))

BEGIN = """
import importlib, time
from planner.executor import Pipeline
from planner.executor.watch.failure import FailureWatch

with FailureWatch({timeout}) as watch:
    pipeline = Pipeline("balance.yaml", watch=watch, timeout_s={timeout})
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
"""


def ended(folder: Path, script: str, *, timeout: float = 30.0) -> Ended:
    """Run a given loop on two ranks."""
    write_balance(TWO, folder / "balance.yaml")
    (folder / "worker.py").write_text(BEGIN.format(timeout=timeout) + script)
    with Job(2, ["worker.py"], folder) as job:
        return job.ended()


COMMIT_FAILS = """
    checkpoints = importlib.import_module("planner.executor.checkpoints")
    saved = checkpoints.Checkpoints(pipeline, optimizer, folder="saved", every=1, steps=9)
    saved._is_async = {is_async}

    def fails(*_):
        raise OSError(28, "No space left on device")

    committing = checkpoints.complete_checkpoint
    for inputs, targets in pipeline.batches(3):
        with pipeline.step(inputs, targets):
            optimizer.step()
        checkpoints.complete_checkpoint = fails if pipeline.step_index > 1 else committing
        saved.step_done()
    saved.close()
"""


@pytest.mark.timed
@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_checkpoint_commit_fails_on_all_ranks(tmp_path: Path, is_async: bool) -> None:  # noqa: FBT001
    """All ranks try again at the end and print one message."""
    done = ended(tmp_path, COMMIT_FAILS.replace("{is_async}", str(is_async)))
    assert done.codes == (2, 2), done
    (error,) = done.errors
    assert "the checkpoint of step 3 was not written: [Errno 28] No space left on device" in error
    assert is_within(done.seconds, 10)


CLIPS_LATE = """
    for inputs, targets in pipeline.batches(1):
        with pipeline.step(inputs, targets):
            if pipeline.rank == 0:
                time.sleep(600)
            pipeline.clip_gradients(1.0)
"""


def test_a_stage_that_hangs_before_clip_gradients_is_named(tmp_path: Path) -> None:
    done = ended(tmp_path, CLIPS_LATE, timeout=3.0)
    (error,) = done.errors
    assert error.startswith("error: stage 0 (layers 0 to 1) has been between steps for ")
    assert error.endswith("stage 1 (layers 2 to 4) waits in the norm of the gradients of step 0")
