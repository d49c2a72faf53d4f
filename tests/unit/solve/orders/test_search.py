"""Search for cuts and action orders together."""

from dataclasses import replace

import pytest

from planner.core.values.cluster import Link
from planner.solve import Request, search, solve
from planner.solve.cases import cases_of
from planner.solve.deadline import NEVER
from planner.solve.methods import SearchedCases, search_function_for
from planner.solve.orders.order_search import OrderSearch
from planner.solve.orders.search import search_orders
from tests.support.chains import chain, layer, random_profile
from tests.support.profiles import inputs_of


def test_search_improves_a_plan_under_1f1b() -> None:
    """A slower plan is never returned, and a small budget suffices."""
    profile = random_profile(1, 12)
    request = Request(inputs=replace(inputs_of(3, 6), schedule="1f1b"), micro_batches=6)
    (plain,) = cases_of(profile, request)
    start = search_function_for(plain, request, None)(plain, upper_us=float("inf"), deadline=NEVER)
    assert start.partition is not None
    (case,) = cases_of(profile, replace(request, inputs=replace(request.inputs, schedule="search", chunks=1)))
    found = search_orders(
        case, upper_us=start.step_us, deadline=replace(NEVER, most_actions=60_000), start=start.partition
    )
    assert found.partition is not None
    assert found.step_us < start.step_us
    assert found.lower_bound_us <= found.step_us
    again = search_orders(
        case, upper_us=found.step_us, deadline=replace(NEVER, most_actions=500), start=found.partition
    )
    assert again.partition is None
    assert again.actions <= 2_000


def test_auto_searches_orders_for_the_best_named_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        layer(
            f"l{n}",
            forward_us=100.0 + 7 * (n % 5),
            backward_us=200.0 + 9 * (n % 3),
            backward_input_us=(105.0,),
            backward_weight_us=(100.0,),
            weight_held_bytes=(30,),
        )
        for n in range(12)
    ]
    profile = chain(*layers)
    request = Request(inputs=replace(inputs_of(3, 6), schedule="auto"), micro_batches=6, actions=20_000)
    nothing = SearchedCases(None, {"search": 0.0}, complete=True, answers={})
    monkeypatch.setattr(search, "_search_orders_twice", lambda *_, **__: nothing)
    monkeypatch.setattr(search, "MOST_ACTIONS_OF_SEARCH", 100_000)
    plan = solve(profile, request)
    assert plan.schedule == "search"
    monkeypatch.setattr(search, "_with_own_orders", lambda searched, *_, **__: searched)
    assert plan.predicted.step_us < solve(profile, request).predicted.step_us


@pytest.mark.slow
def test_orders_near_the_memory_limit_are_checked_by_the_exact_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The approximate memory forbids the order of the best named schedule, so a search that relies on it is slower."""
    work, output = [100.0 * 0.95**n for n in range(10)], [60_000 // 2**n for n in range(10)]
    layers = [
        layer(
            f"l{n}",
            forward_us=work[n],
            backward_us=2 * work[n],
            backward_input_us=(1.04 * work[n],),
            backward_weight_us=(work[n],),
            output_bytes=output[n],
            saved_bytes=3 * output[n],
            weight_held_bytes=(2 * output[n],),
            parameter_bytes=8 * 2**n,
        )
        for n in range(10)
    ]
    profile = chain(*layers)
    inputs = replace(inputs_of(3, 3, memory_bytes=400_000), link=Link(bytes_per_s=25e9, latency_us=1.0))
    request = Request(inputs=replace(inputs, schedule="auto", chunks=0), micro_batches=3)
    best_us = solve(profile, request).predicted.step_us
    monkeypatch.setattr(OrderSearch, "improve", lambda self, _, most_actions: self.search(most_actions))
    assert best_us < 0.95 * solve(profile, request).predicted.step_us
