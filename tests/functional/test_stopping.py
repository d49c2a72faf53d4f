"""Tests of Ctrl-C during `solve`."""

import signal
from pathlib import Path

import pytest

import planner
from planner import files
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
    monkeypatch.setattr(planner, "solve_family", stopped_too_early)
    assert call(capsys, *SOLVE).code == 130


def test_line_during_a_search_has_the_fastest_plan_so_far() -> None:
    """Slower plans of later searches leave it unchanged."""
    shown: list[str] = []
    line = solve._BestPlanLine(lambda text, *_: shown.append(text))
    line.update(2000.0, "1f1b", 1000.0)
    line.update(1250.0, "zbv", 1000.0)
    line.update(1500.0, "gpipe", 1000.0)
    assert shown == [
        "best step 2.00 ms, 1F1B, gap at most 50.0 %",
        "best step 1.25 ms, ZB-V, gap at most 20.0 %",
        "best step 1.25 ms, ZB-V, gap at most 20.0 %",
    ]
