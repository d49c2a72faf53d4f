"""Tests of emitted scripts in a folder with a user's own planner.py."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import emit, solve
from planner.core.values.profile import Model
from tests.support import gate

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import runpy
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as ended:
    assert not ended.code
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


@pytest.mark.slow
def test_an_emitted_script_does_not_import_the_users_planner(tmp_path: Path) -> None:
    """Each module of the package exists once, as `gpipe_plan` and as `planner`."""
    (tmp_path / "planner.py").write_text("raise SystemExit('mine')")
    (tmp_path / "script.py").write_text(SCRIPT)
    profile = replace(gate.profile(), model=Model(source="model.py:build_model"))
    emit(solve(profile, devices=2, mem="8GB"), profile=profile, output=tmp_path)
    done = subprocess.run(
        [sys.executable, "script.py", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--steps" in done.stdout
    assert done.stdout.endswith("\nplanner.executor\n")
