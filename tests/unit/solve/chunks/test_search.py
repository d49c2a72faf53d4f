"""Schedules with several chunks per device: bounds, minimal recomputation choices, and moves of cuts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from planner.core.cost.device_memory import chunk_memory
from planner.core.errors import InfeasibleError, UsageError
from planner.core.schedule import SCHEDULES
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, ScheduleName
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.chunks import search
from planner.solve.chunks.branch_and_bound import BranchAndBound
from planner.solve.chunks.cut_search import CutSearch
from planner.solve.chunks.descent import PartitionCandidate, cut_moves
from planner.solve.chunks.fitting import RecomputeFitter
from planner.solve.chunks.linear_program import LinearExpression, LinearProgram
from planner.solve.chunks.search import all_cuts
from planner.solve.deadline import NEVER, Deadline
from planner.solve.layers.cut_search import CutAndLayerSearch
from planner.solve.layers.devices import RecomputeSearch
from planner.solve.questions import insight
from planner.solve.search_state import SearchState, SimulationBudget
from planner.solve.space.partitions import Evaluator
from tests.support.chains import chain, heavy_chain, layer, random_profile
from tests.support.profiles import UNLIMITED, inputs_of

if TYPE_CHECKING:
    from planner.solve.answer import Answer

SEVERAL: tuple[ScheduleName, ...] = tuple(name for name, schedule in SCHEDULES.items() if schedule.is_chunked)

LINKS = (Link(), Link(latency_us=4.0, bytes_per_s=1e7), Link(latency_us=3.0, bytes_per_s=2e7, blocking=True))


def profile_for(seed: int) -> Profile:
    """Return a chain of seven layers; two of three seeds have random costs, others large activations."""
    return random_profile(seed, 7, exact=seed % 2 == 0) if seed % 3 else heavy_chain(seed, 7)


def inputs_for(schedule: ScheduleName, seed: int, memory_bytes: int) -> Inputs:
    """Return inputs of two devices with two chunks each; speeds and links depend on the seed."""
    inputs = inputs_of(2, 4, memory_bytes=memory_bytes, link=LINKS[seed % 3], overhead_us=3.0 * (seed % 2))
    return replace(inputs, schedule=schedule, chunks=2, speeds=(1.0, 1.5) if seed % 2 else ())


def every_partition(evaluator: Evaluator) -> tuple[np.ndarray, np.ndarray]:
    """Return all cuts with all recomputation choices."""
    num = evaluator.case.costs.num_layers
    inner = combinations(range(1, num), evaluator.num_stages - 1)
    every = [
        ((0, *cuts, num), choices)
        for cuts in inner
        for choices in product(evaluator.allowed, repeat=evaluator.num_stages)
    ]
    return np.array([cuts for cuts, _ in every]), np.array([choices for _, choices in every])


def evaluator_of(
    schedule: ScheduleName, seed: int, memory_bytes: int = UNLIMITED, **changes: object
) -> Evaluator | None:
    """Return the evaluator of a random chain; None if the schedule cannot run it."""
    profile = profile_for(seed)
    inputs = replace(inputs_for(schedule, seed, memory_bytes), **changes)
    evaluator = Evaluator(cases_of(profile, Request(inputs=inputs, micro_batches=4))[0], 2)
    try:
        evaluator.actions  # noqa: B018 - raises where it does not
    except UsageError:
        return None
    return evaluator


def limits_of(evaluator: Evaluator) -> Iterator[int]:
    """Yield memory limits from just enough for one plan to enough for all."""
    cuts, choices = every_partition(evaluator)
    # Under these caps, by how much plans are over is what they hold.
    tiny = replace(evaluator.case, cluster=replace(evaluator.case.cluster, memory_bytes=(0, 0)))
    held = Evaluator(tiny, 2).excess_bytes(cuts, choices).max(axis=1)
    for share in (0.0, 0.05, 0.3, 1.0):
        yield int(np.quantile(held, share)) + 1


def bounds_of(evaluator: Evaluator, scale_us: float) -> BranchAndBound:
    """Return a branch and bound by linear programs for chains of seven layers."""
    return BranchAndBound(LinearProgram(evaluator, np.array([0, 2, 4, 6, 7]), scale_us=scale_us))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (3, 4, 5))])
@pytest.mark.parametrize("schedule", SEVERAL)
def test_bound_is_at_most_every_plan_and_close_to_the_best(schedule: ScheduleName, seed: int) -> None:
    loose = evaluator_of(schedule, seed)
    cuts, choices = every_partition(loose)
    step_us = loose.step_us(cuts, choices)
    for cap in limits_of(loose):
        evaluator = evaluator_of(schedule, seed, cap)
        fits = (evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1)
        assert fits.any()
        best_us = float(step_us[fits].min())
        search = bounds_of(evaluator, best_us)
        bound = search.solve_root()
        assert 0.4 * best_us < bound.bound_us <= best_us
        assert (np.diff(bound.cuts) > 0).all()
        assert (bound.cuts[0], bound.cuts[-1]) == (0, 7)
        assert bound.bound_us <= search.branch(2 * best_us, most_iterations=5000) <= best_us


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", SEVERAL)
def test_bound_of_all_branches_equals_the_best_plan(schedule: ScheduleName, seed: int) -> None:
    """Memory is unlimited, and the search needs no plan to start from."""
    evaluator = evaluator_of(schedule, seed)
    best_us = min(
        evaluator.step_us(cuts, np.zeros((len(cuts), 4), dtype=np.int64)).min() for cuts in all_cuts(evaluator)
    )
    search = bounds_of(evaluator, best_us)
    assert search.solve_root() is not None
    assert search.branch(10 * best_us, most_iterations=10**6) == pytest.approx(best_us, rel=1e-5)
    assert search.branch(0.9 * best_us, most_iterations=10**6) == pytest.approx(0.9 * best_us)


@pytest.mark.parametrize("seed", [0, 3, 6])
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_bound_is_higher_if_memory_requires_recomputation(schedule: ScheduleName, seed: int) -> None:
    loose = evaluator_of(schedule, seed)
    assert loose is not None
    tight = evaluator_of(schedule, seed, next(limits_of(loose)))
    assert tight is not None
    bounds = [bounds_of(evaluator, 1000.0).solve_root() for evaluator in (loose, tight)]
    assert bounds[0] is not None
    assert bounds[1] is not None
    assert bounds[1].bound_us > bounds[0].bound_us * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", SEVERAL)
def test_plan_with_chunks_equals_brute_force_and_is_optimal(schedule: ScheduleName, seed: int) -> None:
    """Brute force tries all choices, although the solver simulates only the minimal ones."""
    loose = evaluator_of(schedule, seed)
    assert loose is not None
    profile = profile_for(seed)
    for cap in limits_of(loose):
        steps = []
        inputs = inputs_for(schedule, seed, cap)
        case = cases_of(profile, Request(inputs=inputs, micro_batches=4))[0]
        for num_devices in (1, 2):
            evaluator = Evaluator(case, num_devices)
            try:
                cuts, choices = every_partition(evaluator)
                fits = (evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1)
            except UsageError:
                continue
            steps += evaluator.step_us(cuts[fits], choices[fits]).tolist()
        plan = solve(profile, Request(inputs=inputs, micro_batches=4))
        assert plan.predicted.step_us == pytest.approx(min(steps), rel=1e-9)
        assert plan.solver.status == "optimal"


@pytest.mark.parametrize("seed", range(4))
def test_memory_of_all_combinations_equals_memory_of_each(seed: int) -> None:
    evaluator = evaluator_of("interleaved", seed, 1)
    assert evaluator is not None
    fitting = RecomputeFitter(evaluator)
    cuts = every_partition(evaluator)[0][::81]
    by_device = [fitting.excess_bytes_by_choices(cuts, np.full(len(cuts), device)) for device in range(2)]
    over = np.stack(by_device, axis=2)
    for n, combination in enumerate(fitting.combinations):
        choices = np.empty((len(cuts), 4), dtype=np.int64)
        for chunks in evaluator.stages_by_device:
            choices[:, list(chunks)] = combination
        assert np.array_equal(over[:, n], evaluator.excess_bytes(cuts, choices))


def test_minimal_choices_are_those_that_fit_with_least_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluator_of("interleaved", 2)
    assert evaluator is not None
    fitting = RecomputeFitter(evaluator)
    over = np.ones((2, 9))
    combinations = fitting.combinations.tolist()
    for combination in ([0, 2], [1, 0], [1, 1], [2, 2]):
        over[0, combinations.index(combination)] = 0
    over[1] = 0
    monkeypatch.setattr(fitting, "excess_bytes_by_choices", lambda *_: over)
    ((first, second),) = fitting.minimal_combinations(every_partition(evaluator)[0][:1])
    assert [combinations[n] for n in np.flatnonzero(first)] == [[0, 2], [1, 0]]
    assert [combinations[n] for n in np.flatnonzero(second)] == [[0, 0]]


def test_moves_shift_blocks_of_cuts() -> None:
    """Moves shift one cut by up to four layers and several by up to two."""
    added = cut_moves([[stage] for stage in range(4)])
    every = {tuple(row) for row in added.tolist()}
    assert {(0, 4, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, -2, -2, 0), (0, 1, 1, 1, 0)} <= every
    assert len(every) == len(added) == 3 * 6 + 2 * 4 + 1 * 4
    assert all(row[0] == row[-1] == 0 for row in every)
    assert not len(cut_moves([[0]]))


def test_no_move_of_a_batch_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a move leaves the recomputation as it was, its simulated step time is already known."""
    evaluator = evaluator_of("zbv", 1)
    assert evaluator is not None
    simulated: list[bytes] = []
    original = Evaluator.step_us

    def record(self: Evaluator, cuts: np.ndarray, choices: np.ndarray, *more: np.ndarray) -> np.ndarray:
        simulated.extend(row.tobytes() for row in np.concatenate([cuts, choices], axis=1))
        return original(self, cuts, choices, *more)

    state = SearchState(case=evaluator.case, budget=SimulationBudget(None), deadline=NEVER, upper_us=np.inf)
    descent = CutSearch(state, evaluator)
    start = PartitionCandidate(cuts=np.array([0, 2, 4, 6, 7]), choices=np.zeros(4, dtype=np.int64))
    monkeypatch.setattr(Evaluator, "step_us", record)
    moves = np.flatnonzero((descent.moves.min(axis=1) == -1) & (descent.moves.sum(axis=1) == -1))
    moved = start.cuts + descent.moves[moves]
    best = descent.pick_best(start, moves)
    assert len(simulated) == len(set(simulated)) == len(moved) == 3
    assert best.step_us == original(evaluator, moved, np.zeros((3, 4), dtype=np.int64)).min()


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "is_large"), [(16, False), (32, True)])
def test_more_moves_are_simulated_at_once_if_steps_are_long(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, *, is_large: bool
) -> None:
    """Batches of 512 partitions take little longer than those of 128."""
    inputs = replace(inputs_of(8, micro_batches, extrapolate=True), schedule="zbv", chunks=2)
    sizes: list[int] = []
    original = Evaluator.step_us

    def record(self: Evaluator, cuts: np.ndarray, *more: np.ndarray) -> np.ndarray:
        sizes.append(len(cuts))
        return original(self, cuts, *more)

    monkeypatch.setattr(Evaluator, "step_us", record)
    solve(random_profile(1, 48), Request(inputs=inputs, micro_batches=micro_batches, searches_longer=False))
    assert (max(sizes) > 128) == is_large


def test_moves_shift_layers_between_stages_of_a_device() -> None:
    num_stages = 40
    every = {tuple(row) for row in cut_moves([(d, num_stages - 1 - d) for d in range(num_stages // 2)]).tolist()}
    for first in range(num_stages // 2):
        last = num_stages - 1 - first
        assert tuple(int(first < cut <= last) for cut in range(num_stages + 1)) in every


def test_linear_expressions_add_factors() -> None:
    one = LinearExpression({1: 2.0, 2: 1.0}, 3.0)
    both = one + LinearExpression({1: -1.0}) + 1.0
    assert (dict(both.factors), both.constant) == ({1: 1.0, 2: 1.0}, 4.0)
    assert dict((one - one).factors) == {1: 0.0, 2: 0.0}
    assert one
    assert not LinearExpression()


def test_fixed_cuts_get_the_best_recomputation() -> None:
    loose = evaluator_of("interleaved", 4)
    assert loose is not None
    profile = profile_for(4)
    cuts, choices = every_partition(loose)
    for balance in ((2, 2, 2, 1), (1, 2, 3, 1), (3, 1, 1, 2)):
        is_one = (np.diff(cuts, axis=1) == balance).all(axis=1)
        for cap in limits_of(loose):
            evaluator = evaluator_of("interleaved", 4, cap)
            fits = is_one & (evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1)
            request = Request(inputs=inputs_for("interleaved", 4, cap), micro_batches=4, balance=balance)
            if not fits.any():
                with pytest.raises(InfeasibleError):
                    solve(profile, request)
                continue
            best_us = evaluator.step_us(cuts[fits], choices[fits]).min()
            assert solve(profile, request).predicted.step_us == pytest.approx(best_us, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_least_memory_of_per_layer_recomputation_is_at_most_the_memory_of_a_stage(
    schedule: ScheduleName, seed: int
) -> None:
    """Every moment is checked, with and without recomputed layers."""
    evaluator = evaluator_of(schedule, seed, recompute="layers")
    rng, costs = random.Random(seed), evaluator.case.costs
    for counts in evaluator.peak_allocation_counts[0][:, 0]:
        first = rng.randrange(6)
        end = rng.randrange(first + 1, 8)
        least, saved = evaluator.memory_bounds_by_layers(counts)
        some = rng.sample(range(first, end), rng.randint(0, end - first))
        splits_backward = evaluator.case.schedule.splits_backward
        chunk = chunk_memory(
            costs, first, end, micro_batches=4, recompute="layers", recomputed=some, splits_backward=splits_backward
        )
        held = chunk.always.total + chunk.allocation_bytes @ counts
        assert held >= least[end, first - end + evaluator.most_layers] - saved[some].sum()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_bound_with_per_layer_recomputation_is_at_most_every_plan(schedule: ScheduleName, seed: int) -> None:
    loose = evaluator_of(schedule, seed)
    assert loose is not None
    for cap in list(limits_of(loose))[:2]:
        evaluator = evaluator_of(schedule, seed, cap, recompute="layers")
        state = SearchState(case=evaluator.case, budget=SimulationBudget(None), deadline=NEVER, upper_us=np.inf)
        search = CutAndLayerSearch(state, evaluator, RecomputeSearch(evaluator))
        places = search.evaluate([cuts for block in all_cuts(evaluator) for cuts in block])
        best_us = min(place.step_us for place in places)
        search = bounds_of(evaluator, 1000.0)
        bound = search.solve_root()
        assert 0.3 * best_us < bound.bound_us <= best_us


@pytest.mark.slow
def test_best_case_is_improved_further_unless_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The improvement respects the time limit."""
    rng = random.Random(5)
    times = [(4000 * rng.lognormvariate(0, 0.7), 8000 * rng.lognormvariate(0, 0.7)) for _ in range(30)]
    profile = chain(*(layer(f"l{n}", forward_us=f, backward_us=b) for n, (f, b) in enumerate(times)))
    request = Request(inputs=replace(inputs_of(4, 8), schedule="interleaved", chunks=3), micro_batches=8)
    monkeypatch.setattr(search, "_MOST_OF_SEARCH_ALONE", 10_000)
    longer = solve(profile, request)
    asked: list[Answer] = []
    monkeypatch.setattr(search, "improve_answer", lambda answer, **_: asked.append(answer) or answer)
    once = solve(profile, request)
    assert longer.predicted.step_us < once.predicted.step_us * 0.995
    assert longer.solver.lower_bound_us == once.solver.lower_bound_us

    (answer,) = asked
    assert answer.step_us == pytest.approx(once.predicted.step_us)
    few = chain(*(layer(forward_us=4000.0, backward_us=8000.0) for _ in range(12)))
    assert solve(few, request).solver.status == "optimal"
    assert len(asked) == 1
    monkeypatch.undo()
    assert search.improve_answer(answer, deadline=Deadline.after(0.0)) == answer


@pytest.mark.slow
def test_descents_in_other_orders_of_moves_find_a_faster_plan() -> None:
    rng, layers = random.Random(2), []
    for n in range(30):
        time_us = 100 * rng.lognormvariate(0, 0.5)
        passes = {"backward_input_us": (time_us,), "backward_weight_us": (time_us,), "weight_held_bytes": (30,)}
        saved_bytes = rng.randrange(50, 150)
        layers.append(layer(f"l{n}", forward_us=time_us, backward_us=2 * time_us, saved_bytes=saved_bytes, **passes))
    inputs = replace(inputs_of(8, 8, memory_bytes=900), schedule="zbv", chunks=0)
    (case,) = cases_of(chain(*layers), Request(inputs=inputs, micro_batches=8))
    first = search.search_chunked_partitions(case, deadline=replace(NEVER, most_actions=50_000))
    steps_us = [search.improve_answer(first, deadline=NEVER, num_searches=number).step_us for number in (0, 1)]
    assert steps_us[1] < 0.98 * steps_us[0] < steps_us[0] < first.step_us


@pytest.mark.slow
def test_noise_analysis_keeps_the_improved_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With almost no spread, no other plan beats the improved one."""
    rng = random.Random(7)
    times = [(4000 * rng.lognormvariate(0, 0.7), 8000 * rng.lognormvariate(0, 0.7)) for _ in range(24)]
    layers = (layer(f"l{n}", forward_us=f, backward_us=b, spread=(1e-9,)) for n, (f, b) in enumerate(times))
    profile = chain(*layers)
    request = Request(inputs=replace(inputs_of(4, 8), schedule="interleaved", chunks=2), micro_batches=8)
    plan = solve(profile, request)
    assert plan.solver.status == "feasible"
    asked: list[Answer] = []
    monkeypatch.setattr(search, "improve_answer", lambda answer, **_: asked.append(answer) or answer)
    monkeypatch.setattr(insight, "_DRAWS", 3)
    found = insight.insight_of(profile, request, plan)
    assert len(asked) == len(found.what_if) == 2
    assert found.noise.draws == 3
    assert found.noise.same_plan == 1.0
    assert found.noise.worst_regret < 1e-6
