"""Check of a plan's certificate."""

from dataclasses import replace

import pytest

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
        assert not certificate._faster(claimed, claimed, profile)[0]
    brief, full = requests
    assert (brief.actions, brief.searches_longer) == (30_000, False)
    assert (full.actions, full.searches_longer) == (Request(inputs=inputs).actions, True)
    slow = replace(plan, solver=SolverReport(method="simulated", status="feasible", lower_bound_us=1.1 * step_us))
    assert "its lower bound is" in certificate._faster(slow, slow, profile)[0]
