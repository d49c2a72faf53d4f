"""Seals of plans, and checks of sealed plans."""

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner import files
from planner.core.values.plan import Plan
from planner.core.values.profile import WritingTool
from planner.solve.questions import certificate
from tests.support import gate


def solved(**options: object) -> Plan:
    return planner.solve(gate.profile(), devices=3, mem="2MB", batch=4, **options)


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
@pytest.mark.parametrize("options", [{}, {"frontier": True, "explain": True}, {"balance": (4, 1, 1)}])
def test_seal_is_valid_before_and_after_writing(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    plan = solved(**options)
    files.write(str(tmp_path / name), plan)
    read = files.read_plan(str(tmp_path / name))
    assert files.has_valid_seal(plan)
    assert files.has_valid_seal(read)
    assert read.seal == plan.seal


def test_changed_plans_have_no_valid_seal() -> None:
    plan = solved()
    bound_us = plan.solver.lower_bound_us
    for changed in (
        replace(plan, solver=replace(plan.solver, lower_bound_us=bound_us + 0.1)),
        replace(plan, inputs=replace(plan.inputs, batch=8)),
        replace(plan, generator=None),
        replace(plan, generator=WritingTool(name="gpipe-plan", version="0.0.1")),
        replace(plan, seal=""),
    ):
        assert not files.has_valid_seal(changed)


def test_check_solves_again_only_without_a_valid_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    solves: list[str] = []

    def noted(written: Plan, verdict: object, _profile: object) -> object:
        solves.append(written.seal)
        return verdict

    monkeypatch.setattr(certificate, "check_certificate", noted)
    plan = solved()
    assert planner.check(plan, profile=gate.profile()).fits
    assert solves == []
    slow = replace(plan, solver=replace(plan.solver, lower_bound_us=1.0))
    planner.check(slow, profile=gate.profile())
    assert solves == [plan.seal]
