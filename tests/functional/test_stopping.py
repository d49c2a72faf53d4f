"""Tests of Ctrl-C during `solve`."""

import signal
from pathlib import Path

import pytest

from planner import api, files
from planner.cli import solve
from planner.core.errors import SolverError
from tests.support.chains import random_profile
from tests.support.cli import call

Capsys = pytest.CaptureFixture[str]

SOLVE = ("solve", "--devices", "2", "--mem", "8GB", "--batch", "2", "--extrapolate")


def stop(*_: object, **__: object) -> None:
    """Act as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def stopped_too_early(*_: object, **__: object) -> None:
    """Replace the search by one that is stopped before it finds a plan."""
    stop()
    raise SolverError("the search was stopped before a plan was found")


def test_ctrl_c_returns_the_best_plan_so_far(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any plan, Ctrl-C is an interrupt."""
    monkeypatch.chdir(tmp_path)
    files.write("profile.yaml", random_profile(1, 6))
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(solve._BestPlanLine, "update", stop)
    stopped = call(capsys, *SOLVE)
    assert stopped.code == 0
    assert "note: interrupted: this is the best plan that was found so far" in stopped.err
    assert "best plan of each schedule" not in stopped.out
    assert call(capsys, "check").code == 0
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(api, "solve_family", stopped_too_early)
    assert call(capsys, *SOLVE).code == 130
