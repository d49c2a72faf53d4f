"""The integer programme against every path of arcs, each timed by playing its flow shops job by job."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pulp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.solve import arcs as arc_bounds
from planner.solve import milp
from planner.solve.milp import ArcProblem, MilpAnswer, Solver, solve_arcs, step_us

KINDS = ("alike", "ordered", "classes", "recompute", "zeros", "links", "tails", "sparse", "whole")


# ---- the oracle


def flow_shop(machines: list[list[float]]) -> float:
    """When the last job leaves the last machine; `machines[k][j]` is the time of job j on machine k."""
    ends = [0.0] * len(machines[0])
    for times in machines:
        free = 0.0
        for job, time in enumerate(times):
            free = max(free, ends[job]) + time
            ends[job] = free
    return ends[-1]


def played(problem: ArcProblem, path: tuple[int, ...]) -> float:
    """Step time of a path of arcs."""
    num = problem.micro_batches
    forward, backward = [], []
    tail = hidden = 0.0
    for arc in path:
        link = float(problem.link_us[arc]) if problem.first[arc] > 0 else 0.0
        forward += [[link] * num, [float(problem.forward_us[arc])] * num]
        last = float(problem.last_backward_us[arc])
        backward += [[link] * num, [float(problem.backward_us[arc])] * (num - 1) + [last]]
        hidden += 2 * link
        tail = max(tail, float(problem.optimizer_us[arc]) - hidden)
        hidden += float(problem.hidden_us[arc])
    return flow_shop(forward) + flow_shop(backward[::-1]) + tail


def paths(problem: ArcProblem, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every path from layer 0 to layer L that the devices allow."""
    layer = int(problem.end[path[-1]]) if path else 0
    if layer == problem.num_layers:
        yield path
        return
    for arc in np.flatnonzero(problem.first == layer).tolist():
        used = [int(problem.device[n]) for n in (*path, arc)]
        fits = used == list(range(len(used))) if problem.ordered else used.count(used[-1]) <= problem.counts[used[-1]]
        if fits:
            yield from paths(problem, (*path, arc))


def best_of_all(problem: ArcProblem) -> float:
    """The smallest step time of all; infinite if there is no path."""
    return min((played(problem, path) for path in paths(problem)), default=np.inf)


# ---- problems


def random_problem(seed: int, kind: str, *, micro_batches: int | None = None) -> ArcProblem:
    """A small problem; times need not add up over layers."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    counts = (int(rng.integers(1, 5)),)
    if kind == "ordered" or (kind in ("recompute", "sparse", "links") and seed % 3 == 1):
        counts = (1,) * int(rng.integers(1, 5))
    elif kind == "classes" or (kind in ("recompute", "sparse", "tails") and seed % 3 == 2):
        counts = tuple(int(n) for n in rng.integers(1, 3, size=rng.integers(2, 4)))
    ordered = len(counts) > 1 and set(counts) == {1} and kind != "classes"
    num_layers = int(rng.integers(1, 7 if len(counts) == 1 or ordered else 6))
    arcs = [(t, i, j) for t in range(len(counts)) for i in range(num_layers) for j in range(i + 1, num_layers + 1)]
    if kind == "recompute":
        arcs = [arc for arc in arcs for _ in range(rng.integers(1, 3))]
    if kind == "sparse":
        arcs = [arc for arc in arcs if rng.random() < 0.35]
    device, first, end = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
    forward, backward, optimizer, extra = (_times(rng, kind, end - first) for _ in range(4))
    link = np.where(first > 0, _times(rng, kind, np.ones(len(first))), 0.0)
    return ArcProblem(
        num_layers=num_layers,
        micro_batches=micro_batches or (1, 2, 3, 5)[seed % 4],
        counts=counts,
        ordered=ordered,
        device=device,
        first=first,
        end=end,
        forward_us=forward,
        backward_us=backward + extra,
        last_backward_us=backward if seed % 5 else backward + 2 * extra,
        link_us=link * (5 if kind == "links" else 0.3),
        optimizer_us=optimizer * (6 if kind == "tails" else 0.2),
        hidden_us=(forward + backward) * (0.3 if kind == "tails" else 1),
    )


def _times(rng: np.random.Generator, kind: str, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    if kind == "whole":  # many plans take the same time
        return rng.integers(0, 3, size=len(sizes)) * 1000.0
    times = rng.uniform(10, 1000, size=len(sizes)) * sizes
    return np.where(rng.random(len(sizes)) < 0.5, 0.0, times) if kind == "zeros" else times


def chain_problem(num_layers: int, counts: tuple[int, ...], micro_batches: int) -> ArcProblem:
    """A chain whose long stages recompute; classes differ in speed, times add up over layers."""
    rng = np.random.default_rng(7)
    layers = np.concatenate([[0.0], np.cumsum(rng.uniform(100, 1000, num_layers))])
    first, end = (np.tile(index, len(counts)) for index in np.triu_indices(num_layers + 1, 1))
    device = np.repeat(np.arange(len(counts)), len(first) // len(counts))
    forward = (layers[end] - layers[first]) * rng.uniform(0.6, 1.6, len(counts))[device]
    again = np.where(end - first >= num_layers / sum(counts), forward, 0.0)
    return ArcProblem(
        num_layers=num_layers,
        micro_batches=micro_batches,
        counts=counts,
        ordered=False,
        device=device,
        first=first,
        end=end,
        forward_us=forward,
        backward_us=2 * forward + again,
        last_backward_us=2 * forward,
        link_us=rng.uniform(10, 100, num_layers)[first],
        optimizer_us=forward / 5,
        hidden_us=3 * forward,
    )


def all_arcs(problem: ArcProblem, upper_us: float) -> tuple[tuple[int, ...], NDArray[np.int64], NDArray[np.float64]]:
    """In place of `narrow`: no plan at hand, and every arc that is on some path."""
    return (), *arc_bounds.prune(problem, np.inf)


@pytest.fixture(params=["narrowed", "whole"])
def _arcs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the bounds may drop arcs before the programme is stated."""
    if request.param == "whole":
        monkeypatch.setattr(milp, "narrow", all_arcs)


def check(problem: ArcProblem, answer: MilpAnswer) -> None:
    """The answer is the best of all paths."""
    best = best_of_all(problem)
    if np.isinf(best):
        assert answer == MilpAnswer(status="infeasible", bound_us=np.inf)
        return
    assert answer.status == "optimal"
    assert answer.arcs in set(paths(problem))
    assert answer.step_us == pytest.approx(played(problem, answer.arcs), rel=1e-11)
    assert answer.step_us == pytest.approx(best, rel=1e-8)
    assert answer.bound_us == answer.step_us


# ---- the claims


@pytest.mark.usefixtures("_arcs")
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_the_best_of_all_paths(kind: str, seed: int) -> None:
    """216 small problems of every kind, with the bounds in front of the programme and without."""
    problem = random_problem(seed, kind)
    check(problem, solve_arcs(problem))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(24, 2**32), kind=st.sampled_from(KINDS), micro_batches=st.sampled_from([1, 2, 4, 50]))
def test_the_plan_is_the_best_of_all_paths_for_any_problem(seed: int, kind: str, micro_batches: int) -> None:
    """And for many micro-batches."""
    problem = random_problem(seed, kind, micro_batches=micro_batches)
    check(problem, solve_arcs(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(milp, "narrow", all_arcs)
        check(problem, solve_arcs(problem))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", KINDS)
def test_the_programme_times_every_path_as_its_flow_shops_do(kind: str, seed: int) -> None:
    """Not only the best: left with one path, the programme's optimum is that path's step time."""
    problem = random_problem(seed, kind)
    for path in list(paths(problem))[:: 1 + seed % 7][:6]:
        step = played(problem, path)
        solved = milp._solve(problem.take(np.array(path)), step, None, "highs")
        assert solved.arcs == tuple(range(len(path)))
        assert solved.bound_us == pytest.approx(step, rel=1e-8)


def test_every_status_and_shape_is_among_the_small_problems() -> None:
    """Else the tests above would claim more than they show."""
    problems = [random_problem(seed, kind) for kind in KINDS for seed in range(24)]
    solvable = [np.isfinite(best_of_all(problem)) for problem in problems]
    assert 8 < solvable.count(False) < 60
    assert sum(problem.ordered for problem in problems) > 20
    assert sum(len(problem.counts) > 1 and not problem.ordered for problem in problems) > 20
    assert {problem.micro_batches for problem in problems} == {1, 2, 3, 5}


@pytest.mark.usefixtures("_arcs")
@pytest.mark.parametrize("micro_batches", [1, 4, 32])
def test_24_layers_on_4_devices(micro_batches: int) -> None:
    """All 2,048 or so ways to cut them."""
    problem = chain_problem(24, (4,), micro_batches)
    check(problem, solve_arcs(problem))


@pytest.mark.parametrize("seed", range(12))
def test_where_the_sets_of_devices_are_too_many_they_are_only_counted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looser bounds, the same plan."""
    monkeypatch.setattr(arc_bounds, "_MAX_WORK", 0)
    problem = random_problem(seed, "classes")
    check(problem, solve_arcs(problem))


@pytest.mark.usefixtures("_arcs")
@pytest.mark.parametrize("kind", KINDS)
def test_cbc_and_highs_agree(kind: str) -> None:
    """Each proves the same step time, or that there is no plan."""
    for seed in (3, 5):
        problem = random_problem(seed, kind)
        highs, cbc = solve_arcs(problem, solver="highs"), solve_arcs(problem, solver="cbc")
        check(problem, cbc)
        assert (cbc.status, cbc.step_us) == (highs.status, pytest.approx(highs.step_us, rel=1e-8))


@pytest.mark.usefixtures("_arcs")
@pytest.mark.parametrize("seed", range(4))
def test_only_plans_within_the_limit_are_asked_for(seed: int) -> None:
    """The limit itself is within; below the best plan there is none, which is a proof."""
    problem = random_problem(seed, "classes", micro_batches=3)
    best = best_of_all(problem)
    for factor in (1.0, 1.001, 2.0):
        check(problem, solve_arcs(problem, upper_us=factor * best))
    below = solve_arcs(problem, upper_us=0.999 * best)
    assert below == MilpAnswer(status="infeasible", bound_us=0.999 * best)


def test_no_arcs_is_no_plan() -> None:
    """As when no layer fits any device."""
    problem = random_problem(1, "alike").take(np.array([], dtype=np.int64))
    assert solve_arcs(problem) == MilpAnswer(status="infeasible", bound_us=np.inf)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_out_of_time_the_best_plan_so_far_is_given_with_a_bound(solver: Solver) -> None:
    """Four classes of devices and few micro-batches: far more than the time allows."""
    problem = chain_problem(60, (2, 2, 2, 2), 3)
    answer = solve_arcs(problem, time_limit_s=0.2, solver=solver)
    assert answer.status == "feasible"
    assert 0.8 * answer.step_us < answer.bound_us <= answer.step_us
    assert answer.step_us == pytest.approx(played(problem, answer.arcs))
    assert [problem.end[arc] for arc in answer.arcs] == [*(problem.first[arc] for arc in answer.arcs[1:]), 60]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_out_of_time_with_no_plan_so_far_there_is_still_a_bound(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound that is known before the solver starts."""
    problem = chain_problem(30, (3, 3, 3), 3)
    step = solve_arcs(problem, time_limit_s=0.01).step_us
    monkeypatch.setattr(milp, "narrow", all_arcs)
    answer = solve_arcs(problem, time_limit_s=0.001, solver=solver)
    assert (answer.status, answer.arcs, answer.step_us) == ("unknown", (), np.inf)
    assert 0.5 * step < answer.bound_us <= step


def test_out_of_time_cbc_is_not_believed_that_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before it branches, it writes "Pre-processing says infeasible or unbounded" of feasible programmes."""
    monkeypatch.setattr(milp, "narrow", all_arcs)
    monkeypatch.setattr(
        pulp.PULP_CBC_CMD, "actualSolve", lambda _, programme: programme.assignStatus(pulp.LpStatusInfeasible)
    )
    problem = random_problem(2, "alike")
    assert solve_arcs(problem, solver="cbc", time_limit_s=1.0).status == "unknown"
    assert solve_arcs(problem, solver="cbc").status == "infeasible"


def test_a_programme_too_large_to_state_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan and the bound known before it are the answer."""
    monkeypatch.setattr(milp, "_MAX_TERMS", 0)
    problem = chain_problem(12, (2, 2), 3)
    answer = solve_arcs(problem)
    assert answer.status == "feasible"
    assert 0.8 * answer.step_us < answer.bound_us <= best_of_all(problem) <= answer.step_us


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_nothing_is_printed(solver: Solver, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither by Python nor by the solvers' own code."""
    solve_arcs(chain_problem(12, (2, 2), 3), solver=solver)
    solve_arcs(random_problem(0, "sparse"), solver=solver)
    assert capfd.readouterr() == ("", "")


def test_without_highs_cbc_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without either there is a remedy."""
    problem = random_problem(2, "alike")
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    check(problem, solve_arcs(problem))
    with pytest.raises(RuntimeError, match="no solver that runs here"):
        solve_arcs(problem, solver="highs")


def test_a_solver_that_contradicts_a_plan_at_hand_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A programme that were stated wrong would else be taken for a proof."""
    monkeypatch.setattr(milp, "_solve", lambda *_: MilpAnswer(status="infeasible", bound_us=np.inf))
    with pytest.raises(RuntimeError, match="but one takes"):
        solve_arcs(random_problem(2, "alike"))


@pytest.mark.parametrize("seed", range(12))
def test_bounds_are_never_above_a_plan(seed: int) -> None:
    """Each arc's bound is at most the step time of the best path through it."""
    problem = random_problem(seed, KINDS[seed % len(KINDS)])
    least = arc_bounds._least_us(problem)
    best = np.full(len(least), np.inf)
    for path in paths(problem):
        for arc in path:
            best[arc] = min(best[arc], played(problem, path))
    assert (least <= best * (1 + 1e-12)).all()


def test_the_step_time_is_that_of_the_flow_shops() -> None:
    """A link belongs to the stage behind it; in front of layer 0 there is none."""
    problem = replace(random_problem(6, "links"), micro_batches=4)
    problem = replace(problem, link_us=problem.link_us + 1.0)
    for path in paths(problem):
        assert step_us(problem, path) == pytest.approx(played(problem, path))
        assert all(problem.end[a] == problem.first[b] for a, b in pairwise(path))


def test_the_solvers_are_not_loaded_before_they_are_needed() -> None:
    """PuLP and HiGHS would cost a short command most of its time."""
    code = "import sys, planner.solve.milp; sys.exit(bool({'pulp', 'highspy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
