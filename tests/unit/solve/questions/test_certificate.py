"""Check of a plan's certificate."""

from dataclasses import replace

import pytest

from planner.core.judge.verdict import judge
from planner.core.values.plan import Plan, SolverReport
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.questions import certificate
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of


def test_certificate_check_finds_a_false_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a gap gets one brief search, a plan that is called optimal gets every search."""
    profile = random_profile(5, 8)
    inputs = replace(inputs_of(3, 6), schedule="auto")
    plan = solve(profile, Request(inputs=inputs, micro_batches=6, actions=10_000, searches_longer=False))
    requests: list[Request] = []

    def noted(profile: Profile, request: Request, **options: bool) -> Plan:
        requests.append(request)
        return solve(profile, replace(request, actions=10_000, searches_longer=False), **options)

    monkeypatch.setattr(certificate, "solve", noted)
    step_us = plan.predicted.step_us
    for status, bound_us in (("feasible", 0.9 * step_us), ("optimal", step_us)):
        claimed = replace(plan, solver=SolverReport(method="simulated", status=status, lower_bound_us=bound_us))
        assert certificate._faster(claimed, claimed, profile) == ("", False)
    brief, full = requests
    assert (brief.actions, brief.searches_longer) == (30_000, False)
    assert (full.actions, full.searches_longer) == (Request(inputs=inputs).actions, True)
    slow = replace(plan, solver=SolverReport(method="simulated", status="feasible", lower_bound_us=1.1 * step_us))
    assert "its lower bound is" in certificate._faster(slow, slow, profile)[0]


def test_an_unproven_claim_to_be_optimal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, inputs = random_profile(5, 8), replace(inputs_of(3, 6), schedule="1f1b")
    plan = solve(profile, Request(inputs=inputs, micro_batches=6))
    assert plan.solver.status == "optimal"
    unproven = replace(plan, solver=replace(plan.solver, status="feasible", lower_bound_us=0.0))
    monkeypatch.setattr(certificate, "solve", lambda *_, **__: unproven)
    verdict = certificate.check_certificate(
        plan, judge(plan, profile, profile_digest=plan.inputs.profile.digest), profile
    )
    assert [each.code for each in verdict.findings if each.code in ("GP205", "GP206")] == ["GP206"]
    assert "does not prove" in next(each.message for each in verdict.findings if each.code == "GP206")
