"""Where linear programs are solved and branched on: only where they can raise the bound or save a search."""

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.core.values.cluster import Link
from planner.core.values.plan import ScheduleName
from planner.solve import Request
from planner.solve.cases import cases_of
from planner.solve.chunks import search
from planner.solve.deadline import NEVER
from planner.solve.search_state import SearchState, SimulationBudget
from tests.support.chains import chain, layer
from tests.support.profiles import inputs_of
from tests.unit.solve.chunks.test_search import SEVERAL, bounds_of, evaluator_of, every_partition, limits_of


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", SEVERAL)
def test_linear_program_stops_at_the_step_time_of_a_known_plan(schedule: ScheduleName, seed: int) -> None:
    """A longer known step time does not change the bound, and branches never raise it above the best plan."""
    loose = evaluator_of(schedule, seed)
    evaluator = evaluator_of(schedule, seed, next(limits_of(loose)))
    cuts, choices = every_partition(evaluator)
    fits = (evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1)
    best_us = float(evaluator.step_us(cuts[fits], choices[fits]).min())
    complete = bounds_of(evaluator, best_us).solve_root()
    assert bounds_of(evaluator, best_us).solve_root(upper_us=0.3 * best_us) == (0.3 * best_us, None)
    branches = bounds_of(evaluator, best_us)
    assert branches.solve_root(upper_us=1.5 * best_us).bound_us == pytest.approx(complete.bound_us)
    assert branches.branch(1.5 * best_us, most_iterations=5000) <= best_us


def test_branch_and_bound_raises_only_the_smallest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    raised_us = {3: 130.0, 2: 105.0, 1: 200.0}
    branched: list[int] = []

    def branch(_: object, num_devices: int, linear: object) -> float:
        assert linear is not None
        branched.append(num_devices)
        return raised_us[num_devices]

    monkeypatch.setattr(search, "branch_and_bound_us", branch)
    case = evaluator_of("zbv", 0).case
    state = SearchState(case=case, budget=SimulationBudget(None), deadline=NEVER, upper_us=150.0)
    bounds = [search._DeviceBound(n, least_us, object()) for n, least_us in ((3, 100.0), (2, 102.0), (1, 110.0))]
    search._branch_from_weakest(state, bounds)
    assert branched == [3, 2]
    assert min(bound.least_us for bound in bounds) == 105.0


def test_fewer_devices_get_no_linear_program_after_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the smallest bound counts, and it is not known."""
    asked: list[int] = []
    monkeypatch.setattr(search, "solve_linear_program", lambda _, each, *__, **___: asked.append(each.num_devices))
    times = [100.0 * random.Random(n).lognormvariate(0, 0.5) for n in range(30)]
    profile = chain(*(layer(f"l{n}", forward_us=us, backward_us=2 * us) for n, us in enumerate(times)))
    inputs = replace(inputs_of(6, 6, link=Link(latency_us=1e3)), schedule="interleaved", chunks=2)
    (case,) = cases_of(profile, Request(inputs=inputs, micro_batches=6))
    search.search_chunked_partitions(case)
    assert asked == [6]


@pytest.mark.slow
def test_linear_programs_stop_at_the_bound_of_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest bound of all cases counts."""
    solved: list[float] = []
    original = search.BranchAndBound.solve_root
    monkeypatch.setattr(
        search.BranchAndBound,
        "solve_root",
        lambda self, **more: solved.append(more["upper_us"]) or original(self, **more),
    )
    times = [100.0 * random.Random(n).lognormvariate(0, 0.5) for n in range(30)]
    profile = chain(*(layer(f"l{n}", forward_us=us, backward_us=2 * us) for n, us in enumerate(times)))
    inputs = replace(inputs_of(6, 6, link=Link(latency_us=1e3)), schedule="interleaved", chunks=2)
    (case,) = cases_of(profile, Request(inputs=inputs, micro_batches=6))
    bound_us = search.search_chunked_partitions(case).lower_bound_us
    assert bound_us > 1.01 * case.bound_us
    for share in (1.002, 0.998):
        solved.clear()
        limits = replace(NEVER, enough_us=share * bound_us)
        answer = search.search_chunked_partitions(case, deadline=limits)
        assert answer.lower_bound_us == pytest.approx(min(share, 1.0) * bound_us)
        assert max(solved) == share * bound_us


def test_no_descent_begins_if_the_bound_reaches_the_best_plan_of_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although the search may return slightly slower plans."""
    begun: list[int] = []
    monkeypatch.setattr(search.CutSearch, "search", lambda self, *_: begun.append(self.evaluator.num_devices))
    times = [100.0 * random.Random(n).lognormvariate(0, 0.5) for n in range(30)]
    profile = chain(*(layer(f"l{n}", forward_us=us, backward_us=2 * us) for n, us in enumerate(times)))
    inputs = replace(inputs_of(6, 6), schedule="interleaved", chunks=2)
    (case,) = cases_of(profile, Request(inputs=inputs, micro_batches=6))
    unreachable_us = 1.01 * case.bound_us
    for best_us, is_searched in ((unreachable_us, False), (np.inf, True)):
        begun.clear()
        answer = search.search_chunked_partitions(
            case, upper_us=3 * unreachable_us, deadline=replace(NEVER, best_us=best_us)
        )
        assert bool(begun) == is_searched
        assert answer.partition is None
        assert answer.lower_bound_us >= min(best_us, unreachable_us)
