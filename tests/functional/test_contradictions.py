"""Tests of `show` and `check` with plans that contradict their profile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import files
from planner.core.values.plan import Plan
from tests.support import gate
from tests.support.cli import call


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Write an optimal plan and its profile."""
    monkeypatch.chdir(tmp_path)
    files.write("profile.yaml", gate.profile())
    assert call(capsys, "solve", "--devices", "3", "--mem", "2MB", "--batch", "4", "--schedule", "gpipe").code == 0
    return files.read_plan("plan.yaml")


def _predicted(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, **changes))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda plan: _predicted(plan, step_us=1.0), "GP203"),
        (lambda plan: _predicted(plan, samples_per_s=1e9, bubble=0.0), "GP203"),
        (lambda plan: replace(plan, balance=(4, 1, 1)), "GP203"),
        (lambda plan: replace(plan, solver=replace(plan.solver, gap=0.5)), "GP205"),
    ],
)
def test_show_uses_the_figures_of_the_profile(plan, edit, expected, capsys):
    """Plans with other cuts are not called optimal."""
    right = call(capsys, "show").out
    files.write("plan.yaml", edit(plan))
    for more in ((), ("--html", "x.html", "--svg", "x.svg")):
        ran = call(capsys, "show", *more)
        assert ran.code == 0
        assert f"warning: {expected}: " in ran.err
        assert "1.00 us" not in ran.out
        assert "optimal" not in ran.out or (expected == "GP203" and ran.out == right)


@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        (lambda plan: replace(plan, balance=(4, 1, 2)), 2, "adds up to 7 layers, the profile has 6"),
        (lambda plan: replace(plan, balance=(6, 6, 6)), 2, "adds up to 18 layers, the profile has 6"),
        (lambda plan: replace(plan, balance=(6, 0, 0)), 2, "every stage needs at least one layer"),
        (
            lambda plan: replace(plan, stages=(replace(plan.stages[0], first="no"), *plan.stages[1:])),
            1,
            'names the layer "no"',
        ),
        (
            lambda plan: replace(plan, inputs=replace(plan.inputs, batch=10**9), micro_batches=10**9),
            2,
            "3 stages with 1000000000 micro-batches are too many to simulate",
        ),
        (
            lambda plan: replace(plan, inputs=replace(plan.inputs, batch=4 * 10**12), micro_batch_size=10**12),
            2,
            "a batch of 4000000000000: at most",
        ),
    ],
)
def test_show_and_check_refuse_the_same_plans(plan, edit, code, message, capsys):
    files.write("plan.yaml", edit(plan))
    for arguments in (("show",), ("show", "--html", "x.html"), ("show", "--trace", "x.json"), ("check",)):
        ran = call(capsys, *arguments)
        assert ran.code == code, ran
        assert message in ran.err + ran.out
        assert "bug" not in ran.err


def test_show_of_a_stale_plan_uses_current_costs(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    files.write("profile.yaml", gate.profile(widened=1000))
    ran = call(capsys, "show")
    assert ran.code == 0
    assert "warning: GP201: the plan was made from another profile" in ran.err
