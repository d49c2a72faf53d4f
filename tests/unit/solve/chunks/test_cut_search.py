"""Local search over cuts: which moves and recomputation choices are evaluated."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.schedule import ListedSchedule
from planner.solve import Request
from planner.solve.cases import cases_of
from planner.solve.chunks.cut_search import CutSearch
from planner.solve.chunks.descent import PartitionCandidate
from planner.solve.chunks.fitting import RecomputeFitter
from planner.solve.deadline import NEVER
from planner.solve.search_state import SearchState, SimulationBudget
from planner.solve.space.partitions import Evaluator
from tests.support.chains import heavy_chain
from tests.support.profiles import UNLIMITED, inputs_of

CUTS = np.array([0, 2, 4, 6, 8])


def evaluator_of(memory_bytes: int = UNLIMITED) -> Evaluator:
    """Return an evaluator of ZBV on two devices for eight layers with large activations."""
    inputs = replace(inputs_of(2, 4, memory_bytes=memory_bytes), schedule="zbv", chunks=2)
    return Evaluator(cases_of(heavy_chain(0, 8), Request(inputs=inputs, micro_batches=4))[0], 2)


def search_of(evaluator: Evaluator, most_actions: int | None = None) -> CutSearch:
    """Return a search that has not found a plan."""
    state = SearchState(case=evaluator.case, budget=SimulationBudget(most_actions), deadline=NEVER, upper_us=np.inf)
    return CutSearch(state, evaluator)


def candidate_of(evaluator: Evaluator, choices: np.ndarray) -> PartitionCandidate:
    """Return the candidate with even cuts."""
    step_us = evaluator.step_us(CUTS[None], choices[None])[0]
    return PartitionCandidate(cuts=CUTS, choices=choices, step_us=float(step_us))


def short_moves(search: CutSearch) -> np.ndarray:
    """Return the indices of the moves of one cut by one layer."""
    return np.flatnonzero(np.abs(search.moves).sum(axis=1) == 1)


def test_memory_of_slower_moves_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More recomputation never makes a move faster, so only moves of stages that recompute may gain."""
    evaluator, none = evaluator_of(), np.zeros(4, dtype=np.int64)
    fastest = replace(candidate_of(evaluator, none), step_us=1e-3)
    fitted: list[int] = []
    original = RecomputeFitter.fit
    monkeypatch.setattr(
        RecomputeFitter,
        "fit",
        lambda self, cuts, *more: fitted.append(len(cuts)) or original(self, cuts, *more),
    )
    search = search_of(evaluator)
    assert not search.pick_best(fastest, short_moves(search)).beats(fastest)
    assert not fitted
    recomputed = np.array([2, 2, 2, 2])
    slowest = candidate_of(evaluator, recomputed)
    assert search.pick_best(slowest, short_moves(search)).beats(slowest)
    assert fitted == [6]


def test_moves_of_a_partition_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of a case share step times; each still counts its simulations, so that its plan stays the same."""
    evaluator = evaluator_of()
    candidate, simulated = candidate_of(evaluator, np.zeros(4, dtype=np.int64)), []
    original = Evaluator.step_us
    monkeypatch.setattr(
        Evaluator, "step_us", lambda self, cuts, *more: simulated.append(len(cuts)) or original(self, cuts, *more)
    )
    searches = [search_of(evaluator) for _ in range(2)]
    best = [search.pick_best(candidate, short_moves(search)) for search in searches]
    assert simulated == [6]
    assert best[0].step_us == best[1].step_us
    assert searches[0].state.budget.spent == searches[1].state.budget.spent > 0


def test_other_recomputations_recompute_less_and_fit() -> None:
    recomputed, found = np.full(4, 2), 0
    for limit in range(4000, 4600, 50):
        evaluator = evaluator_of(limit)
        if evaluator.excess_bytes(CUTS[None], recomputed[None]).any():
            continue
        others = search_of(evaluator)._other_choices(candidate_of(evaluator, recomputed))
        assert not evaluator.excess_bytes(np.repeat(CUTS[None], len(others), axis=0), others).any()
        assert (others < recomputed).any(axis=1).all()
        found += len(others)
    assert found


def test_fit_with_an_order_equals_the_memory_under_its_schedule() -> None:
    orders, results = evaluator_of().actions, set()
    for limit in range(2000, 4600, 100):
        limited = evaluator_of(limit)
        under = limited.with_schedule(ListedSchedule(orders))
        for choice in (0, 1, 2):
            choices = np.full(4, choice)
            fits = not under.excess_bytes(CUTS[None], choices[None]).any()
            assert limited.fits(CUTS, choices, orders) == fits
            results.add(fits)
    assert results == {True, False}


def test_limited_searches_restart_as_often_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of `auto` became up to 9 % faster when its searches no longer ended after four restarts."""
    restarts: list[int] = []
    original = CutSearch.perturb
    monkeypatch.setattr(CutSearch, "perturb", lambda *args: restarts.append(1) or original(*args))
    counts = []
    for most_actions in (None, 10**7):
        restarts.clear()
        search_of(evaluator_of(), most_actions).search([CUTS], 10**6)
        counts.append(len(restarts))
    assert counts[0] == counts[1] >= 12
