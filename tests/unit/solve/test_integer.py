"""Integer program compared with the dynamic program, and errors without an answer.

Property tests compare it with brute force.
"""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pulp
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
    return solve(random_profile(seed, 9), Request(inputs=inputs, solver=solver, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("question", QUESTIONS)
def test_both_solvers_prove_the_same_step_time(question: str, seed: int) -> None:
    plans = [solved(QUESTIONS[question], solver, seed) for solver in ("dp", "milp")]
    assert [plan.solver.status for plan in plans] == ["optimal", "optimal"]
    assert plans[1].solver.method == "integer-programming"
    assert plans[1].predicted.step_us == pytest.approx(plans[0].predicted.step_us, rel=1e-9)


def test_cbc_replaces_missing_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without either solver, the error suggests a remedy."""
    highs = solved(QUESTIONS["unlike"])
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    assert solved(QUESTIONS["unlike"]).predicted.step_us == pytest.approx(highs.predicted.step_us, rel=1e-8)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda _: False)
    with pytest.raises((SolverError, MissingPackageError)):
        solved(QUESTIONS["unlike"])


def test_infeasible_status_of_cbc_after_the_time_limit_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """CBC that is stopped early may report feasible programs as infeasible."""
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    monkeypatch.setattr(
        pulp.PULP_CBC_CMD, "actualSolve", lambda _, program: program.assignStatus(pulp.LpStatusInfeasible)
    )
    with pytest.raises(SolverError, match="time limit"):
        solved(QUESTIONS["alike"], time_limit_s=30.0)


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
