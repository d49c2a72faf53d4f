"""Branch and bound over the largest forward and backward times: exact for any boxes, with true bounds."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.cost.evaluate import Evaluation
from planner.core.values.cluster import Link
from planner.core.values.plan import RecomputePolicy
from planner.solve import Request
from planner.solve.cases import cases_of
from planner.solve.chain import bottlenecks
from planner.solve.chain.bottlenecks import BottleneckSearch
from planner.solve.chain.chain_dp import ChainCuts, CutDynamicProgram
from planner.solve.chain.recurrences import GPipeRecurrence, TieBreakRecurrence
from planner.solve.deadline import OutOfTimeError
from planner.solve.space import prefixes
from planner.solve.space.case import Case
from planner.solve.space.problem import Bottlenecks
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of


class Checks:
    """Deadline that passes after `left` checks."""

    def __init__(self, left: int) -> None:
        self.left = left

    def check(self) -> None:
        """Raise `OutOfTimeError` if no checks are left."""
        self.left -= 1
        if self.left < 0:
            raise OutOfTimeError


def case_of(seed: int, policy: RecomputePolicy = "auto", *, micro_batches: int = 8) -> Case:
    """Return a case of twelve layers on four devices whose memory requires recomputation; odd seeds differ in speed."""
    link = Link(latency_us=3.0, bytes_per_s=1e6, blocking=seed % 4 < 2)
    inputs = inputs_of(4, micro_batches, memory_bytes=9000 + 500 * seed, recompute=policy, link=link)
    if seed % 2:
        inputs = replace(inputs, speeds=(1.0, 2.0, 1.0, 1.5))
    (case,) = cases_of(random_profile(seed, 12), Request(inputs=inputs, micro_batches=micro_batches))
    return case


@pytest.fixture
def _cut_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the search split boxes with more than one label."""
    monkeypatch.setattr(bottlenecks, "_MOST_LABELS", 1)
    monkeypatch.setattr(bottlenecks, "_ENOUGH_LABELS", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("_cut_at_once")
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("policy", ["auto", "never", "always"])
@pytest.mark.parametrize("seed", range(6))
def test_box_search_equals_the_dynamic_program(
    seed: int, policy: RecomputePolicy, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds from 2 to 4 take first plans from shortest paths."""
    if seed in range(2, 5):
        monkeypatch.setattr(bottlenecks, "_LARGE", 0)
    case = case_of(seed, policy, micro_batches=micro_batches)
    problem = case.chain_problem(4, most_layers=12)
    alone = CutDynamicProgram(problem, GPipeRecurrence(micro_batches)).run(upper_us=np.inf)
    search = BottleneckSearch(problem, micro_batches)
    best = search.find_best()
    assert (best is None) == (alone is None)
    if best is not None and alone is not None:
        assert best.step_us == pytest.approx(alone.step_us, rel=1e-11)
        assert search.bound_us == best.step_us
        assert search.find_best(upper_us=best.step_us) == best


@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_stages_computed_level_by_level_give_the_same_labels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems too large for all levels at once compute stages level by level."""
    problem = case_of(seed).chain_problem(4, most_layers=12, every_choice=True)
    assert problem.is_uniform
    recurrence = TieBreakRecurrence(GPipeRecurrence(8), "peak", "moved")
    at_once = CutDynamicProgram(problem, recurrence).run(upper_us=np.inf)
    assert at_once is not None
    monkeypatch.setattr(prefixes, "_MOST_AT_ONCE", 0)
    assert CutDynamicProgram(problem, recurrence).run(upper_us=np.inf) == at_once


@pytest.mark.slow
@pytest.mark.usefixtures("_cut_at_once")
@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 3))])
def test_bound_at_a_deadline_is_at_most_the_best_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottlenecks, "_LARGE", 0 if seed > 1 else 10**6)
    case = case_of(seed)
    problem = case.chain_problem(4, most_layers=12)
    best = BottleneckSearch(problem, 8).find_best()
    assert best is not None
    bounds = []
    for looks in range(4, 400, 5):
        checks = Checks(looks)
        try:
            search = BottleneckSearch(problem, 8, deadline=checks)  # type: ignore[arg-type] - only `check` is called
        except OutOfTimeError:
            continue
        try:
            search.find_best()
        except OutOfTimeError:
            assert search.best_so_far is None or search.best_so_far.step_us >= best.step_us * (1 - 1e-12)
        bounds.append(search.bound_us)
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]
    assert max(bounds) <= best.step_us * (1 + 1e-9)


def test_restricted_problem_drops_only_stages_above_the_bottlenecks() -> None:
    """Devices differ in speed, and links block."""
    case = case_of(1)
    problem = case.chain_problem(4, most_layers=12)
    ends = np.arange(13)
    for level in range(4):
        stages = problem.stages(level, 0, ends)
        fits = np.isfinite(stages.forward)
        most = Bottlenecks(float(np.median(stages.forward[fits])), float(np.median(stages.backward[fits])))
        within = problem.without_slower_stages(most)
        some = within.stages(level, 0, ends)
        narrow = slice(problem.most_layers - within.most_layers, None)
        link = np.broadcast_to(stages.link, stages.forward.shape)
        kept = fits & (np.maximum(stages.forward, link) <= most[0]) & (np.maximum(stages.backward, link) <= most[1])
        assert within.most_layers < problem.most_layers
        assert np.isfinite(some.forward).tolist() == kept[:, narrow].tolist()
        assert not kept[:, : problem.most_layers - within.most_layers].any()
        assert some.backward[kept[:, narrow]].tolist() == stages.backward[kept].tolist()


def test_the_limit_of_a_first_plan_is_raised_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A looser limit creates far more labels, so a plan 8 % above the bound is found with a limit of at most 10 %."""
    case = case_of(0)
    search = BottleneckSearch(case.chain_problem(4, most_layers=12), 8)
    found = ChainCuts(1.08 * search.bound_us, (0, 12), (0,), ())
    limits_us = []

    def run(_search: CutDynamicProgram, *, upper_us: float, **_: object) -> ChainCuts | None:
        limits_us.append(upper_us)
        return found if upper_us > found.step_us else None

    monkeypatch.setattr(CutDynamicProgram, "run", run)
    assert search.find_first() == found
    assert limits_us[-1] <= 1.1 * search.bound_us


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_the_partition_of_a_bound_attains_it(seed: int) -> None:
    case = case_of(seed)
    problem = case.chain_problem(4, most_layers=12)
    search = CutDynamicProgram(problem, GPipeRecurrence(8))
    plan = search.partition_of_bound("passes")
    assert plan is not None
    evaluation = Evaluation(case.costs, case.partition(plan.cuts, plan.choices), case.cluster)
    assert plan.step_us == pytest.approx(evaluation.step_us, rel=1e-11)
    assert plan.cuts[0] == 0
    assert plan.cuts[-1] == 12
    stages = list(search.prefixes.stages_of_bound("passes"))
    passes_us = sum(float((stage.forward + stage.backward + 2 * stage.link)[0]) for stage in stages)
    assert passes_us == pytest.approx(search.lower_bounds()["passes"])
    best = search.find_best()
    assert best is not None
    assert best.step_us <= plan.step_us


def test_long_chains_have_a_first_plan_from_shortest_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dynamic program, which is slow for long chains, does not run."""
    problem = case_of(0).chain_problem(4, most_layers=12)
    best = BottleneckSearch(problem, 8).find_best()
    assert best is not None
    monkeypatch.setattr(bottlenecks, "_LARGE", 0)
    monkeypatch.setattr(CutDynamicProgram, "run", None)
    search = BottleneckSearch(problem, 8)
    first = search.find_first()
    assert first is not None
    assert search.bound_us * (1 - 1e-9) <= best.step_us <= first.step_us <= 1.1 * best.step_us
