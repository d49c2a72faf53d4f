"""Tests that no command overwrites its input files."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from tests.support.cli import call
from tests.support.profiles import profile_of

SOLVE = ("--devices", "2", "--mem", "8GB", "--batch", "2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Write a profile, its plan, and another name for each."""
    monkeypatch.chdir(tmp_path)
    measured = profile_of([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], parameter_bytes=10, size=1)
    files.write("h.yaml", measured)
    assert call(capsys, "solve", "h.yaml", *SOLVE, "-o", "p.yaml").code == 0
    os.link("h.yaml", "hard.yaml")
    Path("soft.yaml").symlink_to("p.yaml")
    Path("links.yaml").write_text("schema: gpipe-plan/links/v1\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("solve", "h.yaml", *SOLVE, "-o", "h.yaml"),
        ("solve", "h.yaml", *SOLVE, "-o", "./x/../h.yaml"),
        ("solve", "h.yaml", *SOLVE, "-o", "hard.yaml"),
        ("solve", "h.yaml", *SOLVE, "--links", "links.yaml", "-o", "links.yaml"),
        ("solve", "h.yaml", *SOLVE, "--calibration", "links.yaml", "-o", "links.yaml"),
        ("solve", "h.yaml", *SOLVE, "--balance", "p.yaml", "-o", "p.yaml"),
        ("show", "p.yaml", "--html", "p.yaml"),
        ("show", "p.yaml", "--svg", "soft.yaml"),
        ("show", "p.yaml", "--html", "h.yaml"),
        ("show", "p.yaml", "--html", "x", "--svg", "x"),
        ("show", "p.yaml", "--svg", "x", "--trace", "./x"),
        ("show", "p.yaml", "--run", "links.yaml", "--html", "links.yaml"),
        ("verify", "p.yaml", "--calibration", "p.yaml"),
        ("verify", "p.yaml", "--profile", "h.yaml", "--calibration", "hard.yaml"),
        ("profile", "model.py", "-o", "model.py"),
        ("profile", "model.py:build", "-o", "model.py"),
    ],
)
def test_outputs_that_are_inputs_are_refused_before_computing(folder, arguments, capsys):
    (folder / "model.py").write_text("def build(): ...\n")
    (folder / "x").unlink(missing_ok=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ran = call(capsys, *arguments)
    assert ran.code == 2
    assert "would overwrite" in ran.error or "are the same file" in ran.error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_emit_does_not_overwrite_the_model_or_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is called train.py, or the plan balance.yaml; `--force` changes nothing."""
    measured = files.read_profile("h.yaml")
    files.write("h.yaml", replace(measured, model=replace(measured.model, source="train.py:build_model")))
    Path("train.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(2, 2))\n")
    assert call(capsys, "solve", "h.yaml", *SOLVE, "-o", "balance.yaml").code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ran = call(capsys, "emit", "balance.yaml", "--force")
    assert (ran.code, "would overwrite" in ran.error) == (2, True)
    Path("balance.yaml").rename("q.yaml")
    ran = call(capsys, "emit", "q.yaml", "--force")
    assert (ran.code, "`train.py` would overwrite train.py" in ran.error) == (2, True)
    assert Path("train.py").read_bytes() == before["train.py"]


def test_dev_null_may_be_named_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "show", "p.yaml", "--svg", "/dev/null", "--html", "/dev/null").code == 0
    assert call(capsys, "show", "p.yaml", "--svg", "a", "--html", "b").code == 0
