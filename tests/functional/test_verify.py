"""Tests of `verify`, which runs a plan and compares the run with its predictions."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner import files
from planner.api import verifying
from planner.cli.main import run
from planner.core.cost.evaluate import Evaluation
from planner.core.errors import MeasurementError, UsageError
from planner.emit.native import decisions_digest
from tests.support.cli import FAST, call, no_calibration, no_proof, write_model
from tests.support.ranks import start_forked
from tests.support.runs import report_of, slower

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a plan of two stages to a subfolder, next to its profile and model."""
    folder = tmp_path_factory.mktemp("finished")
    write_model(folder)
    (folder / "plans").mkdir()
    cuts = ("--balance", "2,3", "--micro-batches", "2", "--schedule", "1f1b")  # whatever the measured times are
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        no_calibration(patch)
        no_proof(patch)
        assert run(["profile", "model.py", *FAST]) == 0
        assert run(["solve", "--devices", "2", "--mem", "8GB", *cuts, "-o", "plans/plan.yaml"]) == 0
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Path:
    """Change to a copy of `finished`."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    no_calibration(monkeypatch)
    return tmp_path


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the ranks without torchrun, which takes them seconds."""
    monkeypatch.setattr(verifying, "_started", start_forked)


@pytest.mark.slow
def test_verify_runs_judges_and_calibrates_a_plan(here: Path, capsys: Capsys) -> None:
    """The calibration is the only file that is written; `solve` and `profile` accept it."""
    before = sorted(here.rglob("*"))
    done = call(capsys, "verify", "plans/plan.yaml", "--steps", "4", "--tolerance-time", "99%", "--format", "json")
    assert done.code in (0, 1), done.err
    document = json.loads(done.out)
    assert document["agrees"] is (done.code == 0)
    assert {row["what"] for row in document["compared"]} == {
        "step_us",
        "bubble",
        "forward_us",
        "backward_us",
        "peak_bytes",
    }
    assert len(document["run"]["losses"]) == 4
    assert sorted(set(here.rglob("*")) - set(before)) == [here / "calibration.yaml"]
    found = files.read_calibration("calibration.yaml")
    assert found.steps == 2
    assert found.compute > 0
    assert found.link.blocking

    options = ("--devices", "2", "--mem", "8GB", "--balance", "2,3", "--micro-batches", "2")
    assert call(capsys, "solve", *options, "--calibration", "calibration.yaml").code == 0
    inputs = files.read_plan("plan.yaml").inputs
    assert (inputs.link, inputs.overhead_us) == (found.link, found.overhead_us)
    assert (inputs.compute, inputs.reserve_bytes) == (found.compute, found.reserve_bytes)
    assert call(capsys, "check").code == 0
    profiled = call(
        capsys,
        "profile",
        "model.py",
        *FAST,
        "--calibration",
        "calibration.yaml",
        "-o",
        "again.yaml",
        "--proof-budget",
        "0s",
    )
    assert profiled.code == 0
    executor = files.read_profile("again.yaml").device.executor
    assert (executor.link, executor.overhead_us) == (found.link, found.overhead_us)
    shown = call(capsys, "show", "calibration.yaml")
    assert (shown.code, "is a calibration" in shown.err) == (2, True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_failed_runs_print_the_message_of_the_script(here: Path) -> None:
    write_model(here, (here / "model.py").read_text().replace("width: int = 16", "width: int = 24"))
    with pytest.raises(
        MeasurementError, match="does not run here: the model has changed since it was planned"
    ) as failed:
        planner.verify("plans/plan.yaml", steps=3)
    assert "profile, solve and emit again" in failed.value.hint


def test_failed_runs_print_the_first_exception_or_exit_code() -> None:
    said = "W1 torch\nTraceback (most recent call last):\n  File\nRuntimeError: out of cheese\n\nChildFailedError: x\n"
    assert "here: RuntimeError: out of cheese" in verifying._failure(said, 1).message
    assert "exit code 7" in verifying._failure("", 7).message


@pytest.mark.slow
def test_verify_judges_a_finished_run_without_torch(here, capsys, monkeypatch):
    monkeypatch.setattr("planner.api.verifying.check_installed", lambda _: pytest.fail("needs torch"))
    plan, profile = files.read_plan("plans/plan.yaml"), files.read_profile("profile.yaml")
    evaluation = Evaluation.of(plan, profile)
    run = replace(report_of(plan, evaluation), plan_digest=decisions_digest(plan))
    files.write("run.json", run)
    words = ("verify", "plans/plan.yaml", "--run", "run.json")
    as_planned = call(capsys, *words)
    assert (as_planned.code, "as predicted (step" in as_planned.out) == (0, True), as_planned.err
    assert "next: " not in as_planned.err

    machine = slower(plan.inputs.cluster, compute=1.5, overhead_us=0.0, link=1.0)
    slow = report_of(plan, replace(evaluation, cluster=machine))
    files.write("run.json", replace(slow, plan_digest=run.plan_digest))
    not_as_planned = call(capsys, *words, "--format", "json")
    assert not_as_planned.code == 1
    again = json.loads(not_as_planned.out)["again"]
    assert f"next: {again}\n" in not_as_planned.err
    assert again.endswith("--calibration calibration.yaml -o plans/plan.yaml")
    assert call(capsys, *shlex.split(again)[1:]).code == 0
    # The stages take some hundreds of microseconds in all, and files round each time to a tenth of one.
    assert files.read_plan("plans/plan.yaml").inputs.compute == pytest.approx(1.5, rel=3e-3)
    assert planner.verify(plan, profile=profile, run=run).again == ""

    batch = plan.inputs.batch
    rates = tuple(3 * batch / time * 1e6 for time in run.step_us)
    files.write("plans/plan.yaml", plan)
    for of, more, said in (
        (replace(run, plan_digest="sha256:other"), (), "run.json belongs to another plan than plans/plan.yaml"),
        (replace(run, device=replace(run.device, kind="cuda")), (), "run.json was made on cuda, the plan is for cpu"),
        (replace(run, samples_per_s=rates), (), f"a step of run.json had {3 * batch} samples, the plan has {batch}"),
        (replace(run, step_us=run.step_us[:2]), (), "2 steps are all warm-up"),
        (run, ("--steps", "5"), "`--steps 5` cannot be used with `--run`"),
        (run, ("--calibration", "run.json"), "would overwrite run.json, which is an input"),
    ):
        files.write("run.json", of)
        refused = call(capsys, *words, *more)
        assert (refused.code, said in refused.err) == (2, True), refused.err


@pytest.mark.slow
def test_options_of_verify_are_checked_before_the_run(here: Path, capsys: Capsys) -> None:
    for options, said in (
        (["--steps", "2"], "at least 3 are needed"),
        (["--tolerance-memory", "5%"], "expected two shares"),
        (["--tolerance-time", "ten"], "ten"),
        (["--calibration", "."], "is a directory"),
        (["--profile", "nowhere.yaml"], "no such file"),
    ):
        done = call(capsys, "verify", "plans/plan.yaml", *options)
        assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.slow
def test_verify_does_not_run_a_stale_plan(here: Path, capsys: Capsys) -> None:
    profile = files.read_profile("profile.yaml")
    files.write("profile.yaml", replace(profile, optimizer="sgd"))
    assert call(capsys, "verify", "plans/plan.yaml").code == 1


@pytest.mark.slow
def test_times_on_too_few_cores_are_not_judged(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of CUDA devices are judged."""
    plan, profile = files.read_plan("plans/plan.yaml"), files.read_profile("profile.yaml")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert "need 2 cores, and this machine has 1" in verifying.reason_times_are_invalid(plan, profile)
    cuda = replace(profile, device=replace(profile.device, kind="cuda"))
    assert verifying.reason_times_are_invalid(plan, cuda) == ""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert verifying.reason_times_are_invalid(plan, profile) == ""


@pytest.mark.slow
def test_calibrations_of_other_devices_are_refused(here: Path, capsys: Capsys) -> None:
    files.write(
        "cuda.yaml",
        files.read_calibration(str(calibration(here, kind="cuda"))),
    )
    done = call(capsys, "profile", "model.py", "--calibration", "cuda.yaml")
    assert (done.code, "the calibration is of cuda, the profile of cpu" in done.err) == (2, True)
    done = call(capsys, "solve", "--devices", "2", "--mem", "8GB", "--calibration", "cuda.yaml")
    assert (done.code, "the calibration is of cuda, the profile of cpu" in done.err) == (2, True)
    with pytest.raises(UsageError):
        planner.solve(devices=2, mem="8GB", calibration="cuda.yaml")


def calibration(folder: Path, **device: str) -> Path:
    """Write a calibration by hand."""
    path = folder / "by_hand.yaml"
    path.write_text(
        f"schema: gpipe-plan/calibration/v1\ndevice: {{kind: {device['kind']}}}\noverhead_us: 5.0\nreserve_bytes: 0\n"
    )
    assert files.read_calibration(str(path)).link is None
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_plan_of_one_stage_can_be_verified(here: Path, capsys: Capsys) -> None:
    assert call(capsys, "solve", "--devices", "1", "--mem", "8GB", "-o", "one.yaml").code == 0
    done = call(capsys, "verify", "one.yaml", "--steps", "3", "--tolerance-time", "99%")
    assert done.code in (0, 1), done.err
    assert "not compared with the unpartitioned model: the plan has a single stage" in " ".join(done.out.split())
