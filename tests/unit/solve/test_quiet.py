"""Suppression of output that solvers print."""

import ctypes
import os
from typing import Any

import highspy
import pytest

from planner.core.extras import discarding_stdout
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of
from tests.unit.solve.chunks.test_search import bounds_of, evaluator_of


def test_banner_of_highs_is_suppressed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.16 prints it to file descriptor 1 when it is created, before its options can disable it."""
    make = highspy.Highs
    made = 0

    def loud() -> Any:
        nonlocal made
        made += 1
        os.write(1, b"Running HiGHS\n")
        ctypes.CDLL(None).printf(b"held back\n")
        return make()

    monkeypatch.setattr(highspy, "Highs", loud)
    solve(random_profile(1, 6), Request(inputs=inputs_of(2, 4), solver="milp"))
    evaluator = evaluator_of("interleaved", 0)
    assert evaluator is not None
    bounds_of(evaluator, 1.0)
    assert made >= 2
    assert capfd.readouterr() == ("", "")


def test_output_outside_the_block_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with discarding_stdout():
        os.write(1, b"dropped\n")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"
