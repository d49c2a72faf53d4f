"""Second lower bound of a plan: over the named schedules only."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from planner.core.errors import InfeasibleError, SolverError
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.answer import Answer
from planner.solve.cases import cases_of
from planner.solve.chunks import case_bounds
from planner.solve.deadline import NEVER
from planner.solve.methods import (
    SearchedCases,
    gains_from_longer_search,
    lower_bound_of_named_schedules_us,
    search_cases,
)
from planner.solve.questions import certificate
from tests.support.profiles import inputs_of
from tests.unit.solve.test_auto import uneven

INPUTS = replace(inputs_of(2, 4), schedule="auto", chunks=0)


def solved(profile: Profile, inputs: Inputs, **options: object) -> Plan:
    return solve(profile, Request(inputs=inputs, micro_batches=4, actions=20_000, **options))


def eight_layers(seed: int) -> Profile:
    return replace(uneven(seed), layers=uneven(seed).layers[:8])


@cache
def plan_with_both_bounds() -> Plan:
    return solved(eight_layers(0), INPUTS)


def test_named_schedules_have_a_higher_bound_than_any_order() -> None:
    plan, solver = plan_with_both_bounds(), plan_with_both_bounds().solver
    assert solver.status == "feasible"
    assert solver.lower_bound_us < solver.named_lower_bound_us <= plan.predicted.step_us
    assert solver.named_schedule_gap(plan.predicted.step_us) < solver.gap


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("memory_bytes", [10_000, 700])
@pytest.mark.parametrize("more", [{"replicas": 0}, {"recompute": "layers"}, {}])
def test_no_named_schedule_beats_the_second_bound(seed: int, memory_bytes: int, more: dict[str, object]) -> None:
    """The bound covers all replicas, chunks and recomputation that the request leaves open."""
    profile = eight_layers(seed)
    inputs = replace(INPUTS, memory_bytes=(memory_bytes,) * 2, **more)
    steps_us = []
    for name in SCHEDULES:
        with suppress(InfeasibleError, SolverError):
            steps_us.append(solved(profile, replace(inputs, schedule=name)).predicted.step_us)
    # The best plan found, an invented one, is slow. So the bound is the smallest of the linear programs.
    request = Request(inputs=inputs, micro_batches=4)
    cases = cases_of(profile, request)
    slow = Answer(cases[0], None, 1.5 * min(steps_us), 0.0, "simulated")
    exact = [case for case in cases if not gains_from_longer_search(case.schedule)]
    answers = search_cases(exact, replace(request, actions=None), NEVER, upper_us=inf).answers
    searched = SearchedCases(slow, {SEARCHED.name: 0.0}, complete=True, answers=answers)
    bound_us = lower_bound_of_named_schedules_us(cases, searched, request, NEVER)
    assert 0.85 * min(steps_us) < bound_us <= min(steps_us) * (1 + 1e-9)
    assert bound_us > min(case.bound_us for case in cases)


@pytest.mark.slow
def test_only_one_open_request_has_a_second_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    named = solved(eight_layers(0), replace(INPUTS, schedule="zb-h1"))
    searched = solved(eight_layers(0), replace(INPUTS, schedule=SEARCHED.name))
    brief = solved(eight_layers(0), INPUTS, searches_longer=False)
    assert [plan.solver.named_lower_bound_us for plan in (named, searched, brief)] == [0.0] * 3
    # Without time for linear programs, a second bound would not be higher.
    monkeypatch.setattr(case_bounds, "_MOST_WORK", 0)
    assert solved(eight_layers(0), INPUTS).solver.named_lower_bound_us == 0.0


def test_check_finds_a_false_bound_for_named_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with_both_bounds()
    zb = solved(eight_layers(0), replace(INPUTS, schedule="zb-h1"))
    monkeypatch.setattr(certificate, "solve", lambda *_, **__: zb)
    assert certificate._faster(plan, plan, eight_layers(0)) == ("", False)
    claimed = replace(plan.solver, named_lower_bound_us=1.1 * zb.predicted.step_us)
    problem, _ = certificate._faster(plan, replace(plan, solver=claimed), eight_layers(0))
    assert problem.startswith("its lower bound for named schedules is ")
    assert problem.endswith("under zb-h1 is faster")
    # A faster plan with a searched order does not refute a bound for named schedules.
    monkeypatch.setattr(certificate, "solve", lambda *_, **__: plan)
    assert certificate._faster(plan, replace(plan, solver=claimed), eight_layers(0)) == ("", False)
