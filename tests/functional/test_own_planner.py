"""Tests of emitted scripts in a folder with a user's own planner.py."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.api import emit, solve
from planner.core.values.profile import Model
from tests.support import gate

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import gpipe_plan
from gpipe_plan.executor import arguments
from importlib import resources
import planner, planner.executor
assert gpipe_plan.solve is planner.solve
assert gpipe_plan.executor.arguments is arguments is planner.executor.arguments
assert gpipe_plan.__version__ == planner.__version__
assert resources.files("planner.emit").joinpath("train_template.py.txt").is_file()
print(planner.executor.__spec__.name)
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_gpipe_plan_and_planner_are_the_same_package(tmp_path: Path) -> None:
    """Each module exists once under both names."""
    (tmp_path / "planner.py").write_text("raise SystemExit('mine')")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path / "script.py")
    assert (done.stdout, done.stderr) == ("planner.executor\n", "")


@pytest.mark.slow
def test_an_emitted_script_does_not_import_the_users_planner(tmp_path: Path) -> None:
    (tmp_path / "planner.py").write_text("raise SystemExit('mine')")
    profile = replace(gate.profile(), model=Model(source="model.py:build_model"))
    emit(solve(profile, devices=2, mem="8GB"), profile=profile, output=tmp_path)
    done = run(tmp_path / "train.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout
