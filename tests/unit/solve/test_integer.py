"""Integer program compared with the dynamic program, and errors without an answer.

Property tests compare it with brute force.
"""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from planner.core.errors import MissingPackageError, SolverError
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, Plan
from planner.solve import Request, integer, solve
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of

QUESTIONS = {
    "alike": inputs_of(3, 8, link=Link(latency_us=20.0, bytes_per_s=1e9)),
    "one micro-batch": inputs_of(3, 1),
    "unlike": replace(inputs_of(3, 8), speeds=(1.0, 2.0, 0.5)),
    "tight": inputs_of(3, 8, memory_bytes=12_000),
    "nodes": replace(
        inputs_of(4, 8, link=Link(bytes_per_s=1e9)), node_devices=2, inter_link=Link(latency_us=50.0, bytes_per_s=1e8)
    ),
}


def solved(inputs: Inputs, solver: str = "milp", seed: int = 4, **more: float) -> Plan:
    return solve(random_profile(seed, 9), Request(inputs=inputs, solver=solver, **more))


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("question", QUESTIONS)
def test_both_solvers_prove_the_same_step_time(question: str, seed: int) -> None:
    plans = [solved(QUESTIONS[question], solver, seed) for solver in ("dp", "milp")]
    assert [plan.solver.status for plan in plans] == ["optimal", "optimal"]
    assert plans[1].solver.method == "integer-programming"
    assert plans[1].predicted.step_us == pytest.approx(plans[0].predicted.step_us, rel=1e-9)


@pytest.mark.parametrize("package", ["pulp", "highspy"])
def test_missing_package_is_reported_with_the_install_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PuLP states the program, HiGHS solves it."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=package) as error:
        solved(QUESTIONS["alike"])
    assert "gpipe-plan[milp]" in error.value.hint


def test_program_that_contradicts_the_cost_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "Evaluation", lambda *_: SimpleNamespace(step_us=1.0))
    with pytest.raises(SolverError, match="the integer program computed"):
        solved(QUESTIONS["alike"])


def test_too_large_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "_MAX_TERMS", 0)
    with pytest.raises(SolverError, match="too large to state") as refused:
        solved(QUESTIONS["alike"])
    assert "--solver dp" in refused.value.hint


def test_integer_solvers_are_loaded_lazily() -> None:
    code = "import sys, planner.solve.integer; sys.exit(bool({'pulp', 'highspy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
