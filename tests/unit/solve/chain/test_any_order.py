"""Orders of unlike devices; tests/property/test_solver.py compares them with brute force."""

from dataclasses import replace

import pytest

from planner.core.errors import UsageError
from planner.solve import Request, solve
from planner.solve.chain import any_order
from planner.solve.chain.any_order import _all_orders
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of


def test_orders_are_those_of_kinds() -> None:
    """Devices of one kind are told apart by nothing; longer orders come first, and the given one before all others."""
    slow, fast = (8, 1.0), (8, 2.0)
    assert _all_orders([slow, fast, slow]) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 1), (0, 2), (1, 0), (0,), (1,)]
    assert len(_all_orders([(8, float(n)) for n in range(5)])) == 325
    assert len(_all_orders([slow] * 4 + [fast] * 4)) == 250


def test_too_many_orders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their kinds, and what to do."""
    monkeypatch.setattr(any_order, "MOST_ORDERS", 10)
    inputs = replace(inputs_of(4, 4), any_order=True, speeds=(1.0, 2.0, 3.0, 4.0))
    with pytest.raises(UsageError, match="4 devices of 4 kinds have more than 10 orders") as refused:
        solve(random_profile(1, 6), Request(inputs=inputs))
    assert "`--mem` and `--speed`" in refused.value.hint


def test_a_plan_in_another_order_names_its_devices() -> None:
    """And is at least as fast as the plan in the given order."""
    profile = random_profile(3, 8)
    given = replace(inputs_of(3, 4), speeds=(0.5, 1.0, 3.0))
    plan = solve(profile, Request(inputs=replace(given, any_order=True)))
    in_order = solve(profile, Request(inputs=given))
    assert plan.predicted.step_us <= in_order.predicted.step_us
    assert [plan.device_of(stage) for stage in plan.stages] != list(range(len(plan.stages)))
