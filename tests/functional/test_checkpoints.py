"""Tests of stopped and failed runs: resumed runs equal undisturbed ones, and failures name their place."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from planner.cli.main import run
from planner.executor.run.loader import seeded_batches
from planner.model.load import load_model
from tests.support.clocks import is_within, seconds_since
from tests.support.processes import Job
from tests.support.ranks import ForkedProcess, run_ranks
from tests.support.training import ROOT, Case, write_balance

pytestmark = pytest.mark.slow

MISCHIEF = ROOT / "tests/zoo/models/mischief.py"
CUTS = {"one": (5,), "two": (2, 3), "three": (1, 2, 2)}


class Ran(NamedTuple):
    """Result of a run."""

    code: int
    out: str
    err: str
    seconds: float
    """From the mischief to the end."""

    @property
    def errors(self) -> list[str]:
        """Return the messages of gpipe-plan."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def ours(self) -> str:
        """Return the output without the lines of torchrun."""
        own = self.err.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]
        return "\n".join(line for line in own.splitlines() if "/elastic/" not in line)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write train.py and balance.yaml for one, two and three stages to folders `one`, `two` and `three`."""
    folder = tmp_path_factory.mktemp("runs")
    template = resources.files("planner.emit").joinpath("train_template.py.txt").read_text(encoding="utf-8")
    for name, balance in CUTS.items():
        (folder / name).mkdir()
        write_balance(Case(model=MISCHIEF, balance=balance, batch=8, micro_batches=4), folder / name / "balance.yaml")
        script = template.format_map(_Anything(num_stages=len(balance), batch=8))
        (folder / name / "train.py").write_text(script)
    return folder


@pytest.fixture(scope="module")
def undisturbed(here: Path) -> list[float]:
    """Return the losses of ten steps, with checkpoints after steps 4, 8 and 10 in `plain`."""
    done = train(here, "two", "--checkpoint", "plain", "--report", "plain.json")
    assert done.code == 0, done.err
    losses: list[float] = json.loads((here / "plain.json").read_text())["losses"]
    assert len(losses) == 10
    assert len(set(losses)) == 10
    return losses


def train(
    here: Path, name: str, *arguments: str, mischief: str = "", restarts: int | None = None, dropout: float = 0.1
) -> Ran:
    """Train ten steps of folder `name`, with a checkpoint every four steps and one `mischief`.

    The ranks are started by torchrun if it has a number of `restarts`.
    """
    arguments = (f"{name}/train.py", "--steps", "10", "--checkpoint-every", "4", *arguments)
    count = len(CUTS[name])
    mark = here / "-".join(mischief.split())
    env = {"DROPOUT": str(dropout), **({"MISCHIEF": f"{mischief} {mark.name}"} if mischief else {})}
    if restarts is not None:
        launcher = ("--standalone", "--nproc-per-node", str(count), "--max-restarts", str(restarts))
        return _torchrun((*launcher, *arguments), here, env, mark)
    if mischief:
        with Job(count, arguments, here, **env) as job:
            done = job.ended()
        return Ran(max(done.codes), done.out, done.err, done.seconds)
    if count > 1:
        return Ran(0, run_ranks(count, arguments, here, **env), "", 0.0)
    out, err = here / "one.out", here / "one.err"
    code = ForkedProcess(arguments, here, out=out, err=err, **env).wait()
    return Ran(code, out.read_text(), err.read_text(), 0.0)


def _torchrun(arguments: Sequence[str], here: Path, environment: dict[str, str], mark: Path) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr, seconds_since(mark))


def weights(here: Path, checkpoint: str) -> dict[str, Tensor]:
    """Return the exported weights of a checkpoint."""
    assert run(["export", str(here / checkpoint), "-o", str(here / "exported.pt"), "-q"]) == 0
    return torch.load(here / "exported.pt", weights_only=True)


def check_equal(here: Path, folder: str, report: str, losses: list[float]) -> None:
    """Check that the run in `folder` has exactly these last losses and the final parameters."""
    assert json.loads((here / report).read_text())["losses"] == losses
    expected, got = weights(here, "plain/step-00000010"), weights(here, f"{folder}/step-00000010")
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("layer", "restarts"), [(2, None), pytest.param(3, 1, marks=pytest.mark.nightly)])
def test_a_killed_stage_is_named_and_the_restart_is_exact(
    here: Path, undisturbed: list[float], layer: int, restarts: int | None
) -> None:
    """Kill -9 in step 6: the other stage names the killed one. The user or torchrun restarts both."""
    folder = f"killed-{layer}"
    arguments = ("--checkpoint", folder, "--resume", "auto", "--report", "killed.json")
    done = train(here, "two", *arguments, mischief=f"kill 25 {layer}", restarts=restarts)
    assert len(done.errors) == 1
    assert "stage 1 (layers 2 to 4) gives no sign of life while stage 0 (layers 0 to 1) wait" in done.errors[0]
    assert done.errors[0].endswith("of step 6")
    assert "Traceback" not in done.err
    if restarts is None:
        assert done.code != 0
        done = train(here, "two", *arguments)
    assert done.code == 0, done.err
    assert f"resumed {folder}/step-00000004 after 4 steps" in done.out
    check_equal(here, folder, "killed.json", undisturbed[4:])


@pytest.mark.timed
@pytest.mark.nightly
def test_the_killed_stage_of_three_is_named(here: Path) -> None:
    """The middle stage is killed; the others wait for it, directly or not. All end within 30 s."""
    done = train(here, "three", mischief="kill 13 2")
    assert done.code != 0
    assert is_within(done.seconds, 30)
    assert len(done.errors) == 1
    assert done.errors[0].startswith("error: stage 1 (layers 1 to 2) gives no sign of life while stage ")
    assert done.errors[0].endswith("of step 3")
    assert "Traceback" not in done.ours


def test_sigterm_saves_a_checkpoint_to_resume_from(here: Path, undisturbed: list[float]) -> None:
    """SIGTERM goes to torchrun, in a step without a checkpoint. Partly written folders of a crash are removed."""
    done = train(here, "two", "--checkpoint", "stopped", mischief="term 22 1", restarts=0)
    assert done.code != 0
    assert "stopped by SIGTERM after" in done.out
    assert "error" not in done.ours
    assert "Traceback" not in done.ours
    last = max(path.name for path in (here / "stopped").iterdir())
    assert "step-00000006" <= last < "step-00000008"

    (here / "stopped/.step-00000008.partial").mkdir()
    again = train(here, "two", "--checkpoint", "stopped", "--resume", "auto", "--report", "stopped.json", "--keep", "1")
    assert again.code == 0, again.err
    check_equal(here, "stopped", "stopped.json", undisturbed[int(last[5:]) :])
    assert [path.name for path in (here / "stopped").iterdir()] == ["step-00000010"]


def test_a_full_disk_leaves_the_last_checkpoint(here: Path, undisturbed: list[float]) -> None:
    """Training continues with a warning. The run ends with an error and can be resumed."""
    done = train(here, "two", "--checkpoint", "full", mischief="full 22 3")
    assert done.code != 0
    assert "warning: full: the checkpoint of step 8 was not written: [Errno 27] File too large" in done.err
    assert "step-00000004 remains the latest; training continues" in done.err
    assert len(done.errors) == 1
    assert "the checkpoint of step 10 was not written" in done.errors[0]
    assert "step 9: loss" in done.out
    assert [path.name for path in (here / "full").glob("*step-*")] == ["step-00000004"]

    again = train(here, "two", "--checkpoint", "full", "--resume", "auto", "--report", "full.json")
    assert again.code == 0, again.err
    check_equal(here, "full", "full.json", undisturbed[4:])


def test_resuming_with_other_numbers_of_stages_is_exact(here: Path, undisturbed: list[float]) -> None:
    """Resume a checkpoint of two stages with one, two, three and one; compare losses with the plain model."""
    del undisturbed
    source = "plain/step-00000008"
    for step, name in enumerate(("one", "two", "three", "one"), 8):
        folder = f"as_{name}_{step}"
        arguments = ("--resume", source, "--checkpoint", folder, "--report", "as.json", "--steps", str(step + 1))
        done = train(here, name, *arguments, dropout=0.0)
        assert done.code == 0, done.err
        assert f"resumed {source}" in done.out
        (loss,) = json.loads((here / "as.json").read_text())["losses"]
        assert loss == pytest.approx(_plain_loss(weights(here, source), step=step), rel=1e-6)
        source = f"{folder}/step-{step + 1:08}"
    assert len(weights(here, source)) == len(weights(here, "plain/step-00000008"))


@pytest.mark.timed
def test_a_hanging_stage_is_named_after_the_timeout(here: Path) -> None:
    """Both stages are idle; the stage that waits for no other is named."""
    done = train(here, "two", "--timeout", "3s", mischief="hang 13 3")
    assert done.code != 0
    assert len(done.errors) == 1
    assert "stage 1 (layers 2 to 4) has been in forward of micro-batch 1 of step 3 for" in done.errors[0]
    assert "stage 0 (layers 0 to 1) waits in" in done.errors[0]
    assert "Traceback" not in done.ours
    assert is_within(done.seconds, 3 + 30)


@pytest.mark.timed
def test_errors_of_the_model_are_reported_once_with_their_line(here: Path) -> None:
    """The message has stage, micro-batch and line of the user's file; the other stage prints nothing."""
    done = train(here, "three", mischief="raise 5 loss")
    assert done.code != 0
    assert is_within(done.seconds, 30)
    where = "stage 2 (layers 3 to 4) failed in forward of micro-batch 1 of step 1"
    assert done.errors == [f"error: {where}: ValueError: something is wrong here"]
    assert f'File "{MISCHIEF}"' in done.ours
    assert 'raise ValueError("something is wrong here")' in done.ours
    assert "site-packages/torch" not in done.ours
    assert "Traceback" not in done.ours


@pytest.mark.timed
def test_check_nan_names_the_stage_that_computed_the_nan(here: Path) -> None:
    done = train(here, "two", "--check-nan", mischief="nan 9 1")
    assert done.code != 0
    assert is_within(done.seconds, 30)
    where = "in forward of micro-batch 1 of step 2"
    assert done.errors == [f"error: stage 0 (layers 0 to 1) returned NaN or infinity {where}, from finite inputs"]


# Private functions


class _Anything(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return key


def _plain_loss(state: dict[str, Tensor], *, step: int) -> float:
    loaded = load_model(str(MISCHIEF))
    model = loaded.build()
    model.load_state_dict(state)
    for layer in model.children():
        layer.dropout = 0.0
    batches = seeded_batches((pair for _ in range(3) for pair in loaded.train_batches(8)), 0)
    pair = [next(batches) for _ in range(step + 1)][-1]
    losses = [loaded.loss_fn(model(x), y) for x, y in zip(pair[0].split(2), pair[1].split(2), strict=True)]
    return float(torch.stack(losses).mean().detach())
