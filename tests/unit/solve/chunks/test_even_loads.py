"""Cuts that distribute the work evenly over devices, as a start of searches for cuts."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.schedule import SCHEDULES
from planner.core.values.plan import Inputs
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.chunks import even_loads, search
from planner.solve.chunks.even_loads import cuts_with_even_loads
from planner.solve.deadline import NEVER
from planner.solve.search_state import SearchState, SimulationBudget
from planner.solve.space.partitions import Evaluator
from tests.support.chains import chain, layer
from tests.support.profiles import inputs_of


def alternating() -> Profile:
    """Return 50 layers, of which every second one takes about twice as long."""
    return chain(
        *(
            layer(
                f"l{n}",
                forward_us=150.0 + 170 * (n % 2),
                backward_us=300.0 + 340 * (n % 2),
                backward_input_us=(150.0 + 170 * (n % 2),),
                backward_weight_us=(150.0 + 170 * (n % 2),),
            )
            for n in range(50)
        )
    )


def zbv(num_devices: int, **more: object) -> Inputs:
    """Return inputs for ZB-V, with 64 micro-batches."""
    return replace(inputs_of(num_devices, 64, extrapolate=True), schedule="zbv", chunks=2, **more)


def largest_share(evaluator: Evaluator, cuts: np.ndarray) -> float:
    """Return the work of the busiest device, relative to the mean."""
    costs = evaluator.case.costs
    before_us = np.concatenate([[0.0], np.cumsum(costs.forward_us + costs.backward_us)])
    loads_us = np.diff(before_us[cuts])[evaluator.stages].sum(axis=1)
    return float(loads_us.max() / loads_us.mean())


def evaluator_for(num_devices: int, **more: object) -> Evaluator:
    case, *_ = cases_of(alternating(), Request(inputs=zbv(num_devices, **more), micro_batches=64))
    return Evaluator(case, num_devices)


def starts_of(evaluator: Evaluator) -> list[np.ndarray]:
    budget = SimulationBudget(None)
    return search.start_cuts(
        SearchState(case=evaluator.case, budget=budget, deadline=NEVER, upper_us=np.inf), evaluator
    )


def test_work_is_distributed_more_evenly_than_by_stage() -> None:
    evaluator = evaluator_for(16)
    *by_stage, by_device = [largest_share(evaluator, cuts) for cuts in starts_of(evaluator)]
    assert min(by_stage) > 1.2
    assert by_device < 1.1


def test_rules_hold() -> None:
    """Rules may forbid the evenest cuts."""
    evaluator = evaluator_for(8, together=tuple((f"l{n}", f"l{n + 1}") for n in range(0, 50, 10)))
    starts = starts_of(evaluator)
    assert all(evaluator.case.rules.allows(cuts[None])[0] for cuts in starts)


@pytest.mark.slow
def test_plan_is_faster_than_from_other_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short search does not reach such a plan from the other starts."""
    request = Request(inputs=zbv(16), micro_batches=64)
    monkeypatch.setattr(search, "_MOST_OF_SEARCH_ALONE", 100_000)
    step_us = solve(alternating(), request).predicted.step_us
    monkeypatch.setattr(search, "cuts_with_even_loads", lambda _, cuts: cuts)
    assert step_us < 0.96 * solve(alternating(), request).predicted.step_us


def test_speeds_of_devices_count() -> None:
    evaluator = evaluator_for(4, speeds=(1.0, 1.0, 1.0, 3.0))
    cuts = cuts_with_even_loads(evaluator, starts_of(evaluator)[0])
    num_layers = np.diff(cuts)[evaluator.stages].sum(axis=1)
    assert num_layers[3] > 2 * num_layers[:3].max()


def test_schedules_with_the_same_placement_share_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluator_for(5)
    first = starts_of(evaluator)
    monkeypatch.setattr(even_loads, "_EvenLoads", None)  # a second search would raise an error
    other = Evaluator(replace(evaluator.case, schedule=SCHEDULES["dualpipev"]), 5)
    assert all(np.array_equal(*both) for both in zip(first, starts_of(other), strict=True))
