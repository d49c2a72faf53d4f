"""Tests of plans for several cluster sizes, from which train.py selects one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from tests.support import gate
from tests.support.cli import call
from tests.support.processes import write_script
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

MISCHIEF = ROOT / "tests/zoo/models/mischief.py"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a profile of six layers of 100 kB."""
    monkeypatch.chdir(tmp_path)
    gate.write(tmp_path)
    (tmp_path / "plan.yaml").unlink()
    return tmp_path


def test_plans_for_several_sizes_equal_single_plans(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--mem", "1MB", "--batch", "4", "--schedule", "gpipe")
    for count, output in ((3, "three.yaml"), (2, "two.yaml")):
        assert call(capsys, "solve", "--devices", str(count), *asked, "-o", output).code == 0
    done = call(capsys, "solve", "--devices", "2,3", *asked)
    assert done.code == 0
    assert "\n2 devices: GPipe, 2 stages" in done.out
    assert "wrote plan.yaml, plan-2.yaml\n" in done.err
    assert "next: gpipe-plan emit --smaller plan-2.yaml\n" in done.err
    for one, of_family in (("three.yaml", "plan.yaml"), ("two.yaml", "plan-2.yaml")):
        assert (here / one).read_bytes() == (here / of_family).read_bytes()
    assert call(capsys, "check", "plan-2.yaml").code == 0
    plans = json.loads(call(capsys, "solve", "--devices", "3,2", *asked, "--format", "json").out)
    assert [plan["inputs"]["devices"] for plan in plans] == [3, 2]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--devices 3,2 --mem 1MB -o -", 2, "2 plans cannot be written to standard output"),
        ("--devices 3,1 --mem 1MB", 1, "with 1 device: "),
        ("--devices 3,3 --mem 1MB", 2, "expected different numbers of devices, got `--devices 3,3`"),
        ("--devices 3, --mem 1MB", 2, "`--devices 3,`: expected one integer, or several separated by commas"),
        ("--devices 3,2 --mem 1MB,1MB,2MB", 2, "names 3 limits for 2 devices"),
    ],
)
def test_plans_for_several_sizes_are_written_only_if_all_exist(here, capsys, options, code, message):
    done = call(capsys, "solve", "--batch", "4", *options.split())
    assert (done.code, message in done.error) == (code, True), done
    assert [path.name for path in here.iterdir()] == ["profile.yaml"]


@pytest.mark.slow
def test_a_run_continues_with_a_smaller_plan_after_a_loss(tmp_path: Path) -> None:
    """One process of three is killed in step 3. Losses of the other two equal those of three up to rounding."""
    case = Case(model=MISCHIEF, balance=(1, 2, 2), batch=8, micro_batches=4)
    write_script(case, tmp_path)
    write_balance(replace(case, balance=(2, 3)), tmp_path / "balance-2.yaml")
    largest = replace(files.read_balance(str(tmp_path / "balance.yaml")), smaller=(2,))
    files.write(str(tmp_path / "balance.yaml"), largest)
    steps = ("train.py", "--steps", "6", "--checkpoint-every", "2")
    run_ranks(3, [*steps, "--report", "whole.json"], tmp_path, DROPOUT="0")
    resumed = (*steps, "--checkpoint", "saved", "--resume", "auto", "--report", "lost.json")
    with pytest.raises(AssertionError, match=r"ranks \[1\]"):
        run_ranks(3, resumed, tmp_path, DROPOUT="0", MISCHIEF="kill 13 2 lost")
    said = run_ranks(2, resumed, tmp_path, DROPOUT="0")
    assert "resumed saved/step-00000002 after 2 steps (written by 3 ranks, balance [1, 2, 2])" in said
    whole, lost = (json.loads((tmp_path / name).read_text())["losses"] for name in ("whole.json", "lost.json"))
    assert lost == pytest.approx(whole[2:], rel=1e-6)
