"""Tests of the table of faults in `docs/training.md`: message, time until other ranks end, and lost work."""

import re
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support.clocks import is_within
from tests.support.processes import Ended, Job, write_script
from tests.support.training import ROOT, Case

pytestmark = pytest.mark.slow

MISCHIEF: Final = ROOT / "tests/zoo/models/mischief.py"
TWO: Final = Case(model=MISCHIEF, balance=(2, 3), batch=8, micro_batches=4)
INTERLEAVED: Final = Case(
    model=MISCHIEF, balance=(1, 1, 1, 2), batch=8, micro_batches=4, chunks=2, schedule="interleaved"
)


def train(case: Case, folder: Path, *arguments: str, mischief: str = "") -> Job:
    """Train ten steps with a checkpoint every four, and cause `mischief` once."""
    write_script(case, folder)
    environment = {"MISCHIEF": f"{mischief} {'-'.join(mischief.split())}"} if mischief else {}
    given = ["train.py", "--steps", "10", "--checkpoint-every", "4", *arguments]
    return Job(case.num_processes, given, folder, **environment)


def ended(case: Case, folder: Path, *arguments: str, mischief: str = "") -> Ended:
    """Return the result of `train`."""
    with train(case, folder, *arguments, mischief=mischief) as job:
        return job.ended()


@pytest.mark.timed
@pytest.mark.parametrize("where", ["data", "0"])
def test_system_exit_of_one_rank_ends_all(tmp_path: Path, where: str) -> None:
    """The line is reported once. The rank keeps its exit code, and the others report a failed run."""
    done = ended(TWO, tmp_path, mischief=f"exit 9 {where}")
    assert sorted(done.codes) == [2, 3], done
    assert is_within(done.seconds, 10)
    assert len(done.errors) == 1, done.err
    assert "(SystemExit: 3)" in done.errors[0]
    assert "stage " in done.errors[0]
    assert "sys.exit(3 if what" in done.err
    assert "Traceback" not in done.err


@pytest.mark.timed
def test_a_rank_that_exits_early_with_code_0_is_named(tmp_path: Path) -> None:
    """This is a failure because the others wait for the rank."""
    done = ended(TWO, tmp_path, mischief="leave 9 1")
    assert done.codes == (2, 2), done
    assert is_within(done.seconds, 15)
    (error,) = done.errors
    assert error.startswith("error: stage 0 (layers 0 to 1) exited in forward of micro-batch ")
    assert "(SystemExit: 0) while stage 1 (layers 2 to 4) waited in" in error


@pytest.mark.timed
def test_exit_code_0_on_every_rank_is_no_failure(tmp_path: Path) -> None:
    write_script(TWO, tmp_path)
    script = (tmp_path / "train.py").read_text()
    early = "            if loss < 100.0:\n                raise SystemExit(0)\n"
    progress = "            progress(pipeline, step, loss)\n"
    assert progress in script
    (tmp_path / "train.py").write_text(script.replace(progress, progress + early))
    with Job(2, ["train.py"], tmp_path) as job:
        done = job.ended()
    assert done.codes == (0, 0), done
    assert is_within(done.seconds, 3)
    assert (done.out.count("step "), done.err) == (1, "")


@pytest.mark.timed
def test_a_second_sigterm_ends_a_hanging_run_at_once(tmp_path: Path) -> None:
    with train(TWO, tmp_path, "--checkpoint", "saved", mischief="hang 25 3") as job:
        job.wait_for((tmp_path / "hang-25-3").exists)
        job.send(signal.SIGTERM, 0)
        time.sleep(2.0)
        assert all(process.poll() is None for process in job.processes)
        job.send(signal.SIGTERM, 0)
        done = job.ended()
    assert done.codes[0] == 143
    assert done.codes[1] != 0
    assert is_within(done.seconds, 10)
    assert "stopped at once by a second SIGTERM: stage 0 (layers 0 to 1) was in " in done.err
    assert "steps since the last checkpoint are lost" in done.err
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-00000004"]


def test_the_first_sigterm_reports_when_the_run_stops(tmp_path: Path) -> None:
    with train(TWO, tmp_path, "--checkpoint", "saved", "--steps", "100000") as job:
        job.wait_for("step 3: loss")
        job.send(signal.SIGTERM, 1)
        done = job.ended()
    assert done.codes == (143, 143), done
    assert "SIGTERM: stopping after " in done.out
    assert "with a checkpoint; a second signal stops at once, without a checkpoint" in done.out
    assert done.errors == []


@pytest.mark.timed
def test_failures_under_interleaved_name_one_process(tmp_path: Path) -> None:
    done = ended(INTERLEAVED, tmp_path, mischief="raise 9 2")
    assert done.codes == (2, 2), done
    assert is_within(done.seconds, 10)
    (error,) = done.errors
    assert (
        error
        == "error: stage 2 (layer 2) failed in forward of micro-batch 1 of step 2: ValueError: something is wrong here"
    )
    assert "pipeline schedule" not in done.err
    assert "Step " not in done.err

    done = ended(INTERLEAVED, tmp_path, mischief="kill 9 1")
    (error,) = done.errors
    assert error.startswith(
        "error: the process of stages 1 (layer 1) and 3 (layers 3 to 4) gives no sign of life while "
    )


def test_a_stopped_process_is_a_possible_cause_in_the_message(tmp_path: Path) -> None:
    with train(TWO, tmp_path, "--steps", "100000", "--timeout", "2s") as job:
        job.wait_for("step 3: loss")
        job.send(signal.SIGSTOP, 1)
        job.processes[0].wait(60)
        error = next(tmp_path.glob("job-*-0.err")).read_text()
    assert "error: stage 1 (layers 2 to 4) gives no sign of life while stage 0 (layers 0 to 1) waited in" in error
    assert "its process was killed or is stopped, or its machine is lost" in error


def test_every_fault_in_the_table_has_a_test() -> None:
    """`docs/measurements/restarts.md` names no test that is not there, and has a row for each of these."""
    page = (ROOT / "docs/measurements/restarts.md").read_text()
    named = re.findall(r"^\| .* \| `(test_\w+)` \|$", page, re.MULTILINE)
    assert len(named) == len(set(named)) > 20
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    assert set(named) <= defined
    here = re.findall(r"^def (test_\w+)\(tmp_path", Path(__file__).read_text(), re.MULTILINE)
    assert set(here) - {"test_the_first_sigterm_reports_when_the_run_stops"} <= set(named)
