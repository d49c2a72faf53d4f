"""Tests of jobs in which one rank has a smaller mini-batch or leaves its loop early."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.clocks import is_within
from tests.support.ranks import EndedRanks, end_ranks
from tests.support.training import ROOT, Case, write_balance

pytestmark = [pytest.mark.slow, pytest.mark.timed]

THREE = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(1, 2, 2), micro_batches=2)
REPLICAS = replace(THREE, balance=(2, 3), replicas=2)

TRAIN = """
import sys
from pathlib import Path
from planner.executor import Pipeline
from planner.executor.watch.failure import FailureWatch

who, what = int(sys.argv[1]), sys.argv[2]
with FailureWatch(20.0) as watch:
    pipeline = Pipeline("balance.yaml", watch=watch, timeout_s=20.0)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    differs = pipeline.rank == who
    for inputs, targets in pipeline.batches(2 if differs and what == "data ends" else 3):
        step = pipeline.step_index
        if differs and what == f"smaller in step {step}":
            inputs, targets = inputs[:-2], targets[:-2]
        with pipeline.step(inputs, targets):
            optimizer.step()
            Path(f"updated-{pipeline.rank}-{step}").touch()
        if differs and what == "break" and step == 1:
            break
    if differs and what == "evaluation":
        pipeline.evaluate(*pipeline.own_part(*pipeline.example_batch(9)))
    pipeline.close()
    Path(f"closed-{pipeline.rank}").touch()
"""

SMALLER = "at step {step} with a mini-batch of {count} samples"
LEAVES = "at the end of its loop after 2 steps"
OTHERS = {
    "smaller in step 0": (SMALLER.format(step=0, count=6), "at step 0 with a mini-batch of 8 samples"),
    "smaller in step 2": (SMALLER.format(step=2, count=6), "at step 2 with a mini-batch of 8 samples"),
    "data ends": (LEAVES, "at step 2 with a mini-batch of 8 samples"),
    "break": (LEAVES, "at step 2 with a mini-batch of 8 samples"),
    "evaluation": ("at an evaluation of 8 samples after 3 steps", "at the end of its loop after 3 steps"),
}
"""By what one rank does: where it is, and where the others are."""


def ended(folder: Path, case: Case, *arguments: object, script: str = TRAIN) -> EndedRanks:
    """Run a given loop on every rank."""
    write_balance(case, folder / "balance.yaml")
    (folder / "worker.py").write_text(script)
    return end_ranks(case.num_processes, ["worker.py", *map(str, arguments)], folder)


def common_error(done: EndedRanks) -> str:
    """Return the message that all ranks print."""
    assert set(done.codes) == {2}, done
    assert is_within(done.seconds, 8), done
    (error,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    return error


@pytest.mark.parametrize(
    ("what", "who"),
    [
        ("smaller in step 0", 0),
        ("smaller in step 2", 1),
        ("smaller in step 2", 2),
        ("break", 0),
        ("evaluation", 2),
        ("data ends", 1),
        *(
            pytest.param(what, who, marks=pytest.mark.nightly)
            for what, who in (("smaller in step 0", 2), ("smaller in step 2", 0), ("break", 2), ("evaluation", 0))
        ),
    ],
)
def test_a_smaller_mini_batch_of_one_stage_is_reported_before_the_step(tmp_path: Path, what: str, who: int) -> None:
    """No rank updates parameters in that step or exits with code 0."""
    error = common_error(ended(tmp_path, THREE, who, what))
    own, others = OTHERS[what]
    if who == 0:
        assert error == f"error: rank 1 is {others}, but rank 0 is {own}"
    else:
        before = "rank 0 is" if who == 1 else "rank 1 and all ranks before it are"
        assert error == f"error: rank {who} is {own}, but {before} {others}"
    steps_done = {"smaller in step 0": 0, "evaluation": 3}.get(what, 2)
    assert len(list(tmp_path.glob("updated-*"))) == 3 * steps_done
    assert not list(tmp_path.glob("closed-*"))


def test_a_rank_that_leaves_its_loop_before_a_checkpoint_is_named(tmp_path: Path) -> None:
    saves = """
    from planner.executor.checkpoints import Checkpoints
    saved = Checkpoints(pipeline, optimizer, folder="saved", every=2, steps=3)
    differs = pipeline.rank == who
"""
    script = TRAIN.replace("    differs = pipeline.rank == who\n", saves)
    script = script.replace("            break\n", "            break\n        saved.step_done()\n")
    error = common_error(ended(tmp_path, THREE, 0, "break", script=script))
    assert error == f"error: rank 1 is at a checkpoint after 2 steps, but rank 0 is {LEAVES}"


def test_a_replica_that_leaves_its_loop_is_named(tmp_path: Path) -> None:
    """Its ranks agree with each other; the ranks of last stages detect the difference."""
    script = TRAIN.replace("pipeline.rank == who", "pipeline.place.replica == who")
    error = common_error(ended(tmp_path, REPLICAS, 1, "break", script=script))
    assert error in {
        f"error: rank 1 is at step 2, but rank 3 is {LEAVES}",
        f"error: rank 3 is {LEAVES}, but rank 1 is at step 2",
    }
    assert len(list(tmp_path.glob("updated-*"))) == 4 * 2
    assert not list(tmp_path.glob("closed-*"))


def test_a_rank_with_a_smaller_mini_batch_is_named_within_its_replica(tmp_path: Path) -> None:
    error = common_error(ended(tmp_path, REPLICAS, 3, "smaller in step 2"))
    assert (
        error
        == f"error: rank 3 is {SMALLER.format(step=2, count=2)}, but rank 2 is at step 2 with a mini-batch of 4 samples"
    )
    assert len(list(tmp_path.glob("updated-*"))) == 4 * 2
