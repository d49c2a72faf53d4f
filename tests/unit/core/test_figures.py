"""Figures of a plan, recomputed by `check` instead of trusted."""

from dataclasses import fields, replace
from typing import Any

import pytest

import planner
from planner.core.judge.verdict import certificate_problems
from planner.core.values.plan import Plan, Predicted, SolverReport
from tests.support import gate


def solved(**options: Any) -> Plan:
    return planner.solve(gate.profile(), devices=3, mem="2MB", batch=4, **options)


def codes(plan: Plan) -> list[str]:
    return [found.code for found in planner.check(plan, profile=gate.profile()).findings]


def test_solved_plans_have_no_findings() -> None:
    asked: list[dict[str, Any]] = [{}, {"frontier": True}, {"schedule": "1f1b"}, {"schedule": "auto", "explain": True}]
    asked += [{"balance": (4, 1, 1)}, {"solver": "milp"}, {"replicas": "auto", "frontier": True}]
    for options in asked:
        assert codes(solved(**options)) == [], options


@pytest.mark.parametrize("name", [each.name for each in fields(Predicted)])
def test_edited_predictions_are_reported(name: str) -> None:
    plan = solved()
    edited = replace(plan, predicted=replace(plan.predicted, **{name: 1 + 2 * getattr(plan.predicted, name)}))
    found = planner.check(edited, profile=gate.profile()).findings
    assert [each.code for each in found] == ["GP203"]
    assert name == "step_us" or f"`predicted.{name}`" in found[0].message


@pytest.mark.parametrize("name", ["forward_us", "backward_us", "memory_bytes", "layers", "index"])
def test_edited_stages_are_reported(name: str) -> None:
    plan = solved()
    stage = replace(plan.stages[1], **{name: 1 + 2 * getattr(plan.stages[1], name)})
    edited = replace(plan, stages=(plan.stages[0], stage, *plan.stages[2:]))
    found = planner.check(edited, profile=gate.profile()).findings
    assert "GP203" in [each.code for each in found]
    assert any(f"`stages[1].{name}`" in each.message for each in found)


def test_false_certificates_are_reported() -> None:
    """Slow cuts that claim to be optimal, wrong bounds and wrong gaps get the status `given`."""
    slow = solved(balance=(4, 1, 1))
    step_us = slow.predicted.step_us
    for report in (
        SolverReport(method="dynamic-programming", status="optimal", lower_bound_us=step_us),
        SolverReport(method="dynamic-programming", status="feasible", lower_bound_us=step_us * 0.99, gap=0.01),
        SolverReport(method="dynamic-programming", status="feasible", lower_bound_us=step_us / 2, gap=0.01),
        SolverReport(method="x", status="optimal", lower_bound_us=step_us / 2, gap=0.5),
        SolverReport(method="x", status="optimal", lower_bound_us=step_us * 2),
        SolverReport(method="given", status="given", lower_bound_us=step_us),
        SolverReport(method="given", status="given", named_lower_bound_us=step_us),
        SolverReport(method="x", status="optimal", lower_bound_us=step_us, named_lower_bound_us=step_us),
        SolverReport(method="x", status="feasible", lower_bound_us=1.0, gap=1 - 1 / step_us, named_lower_bound_us=0.5),
    ):
        verdict = planner.check(replace(slow, solver=report), profile=gate.profile())
        assert [each.code for each in verdict.findings] == ["GP205"], report
        assert verdict.plan.solver.status == "given"
    assert certificate_problems(slow, slow.solver) == ()


def test_edited_trade_offs_are_reported() -> None:
    plan = solved(frontier=True)
    first = plan.frontier[0]
    for frontier in (
        (replace(first, samples_per_s=first.samples_per_s + 1), *plan.frontier[1:]),
        (replace(first, peak_bytes=1), *plan.frontier[1:]),
        (*plan.frontier, replace(first, micro_batches=3)),
        (replace(first, step_us=1.0), *plan.frontier[1:]),
    ):
        assert codes(replace(plan, frontier=frontier)) == ["GP205"]
