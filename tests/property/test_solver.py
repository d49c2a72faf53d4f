"""The solver against brute force, and the closed form against the simulator, on random problems."""

import pytest
from hypothesis import given, settings

from planner.core.costs import costs_at
from planner.core.errors import InfeasibleError
from planner.core.evaluate import Partition, optimizer_us, step_us, timeline
from planner.core.planning import cluster_of
from planner.core.verdict import judge
from planner.solve import Request, solve
from tests.support.brute_force import best_step_us
from tests.support.random_problems import Problem, problems


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_solver_is_as_fast_as_brute_force(problem: Problem) -> None:
    """The plan's step time is the smallest of all; "infeasible" only where brute force finds nothing."""
    best = best_step_us(problem.profile, problem.inputs)
    request = Request(inputs=problem.inputs)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(problem.profile, request)
        return
    plan = solve(problem.profile, request)
    assert plan.predicted.step_us == pytest.approx(best, rel=1e-9)
    assert plan.solver.status == "optimal"
    assert plan.solver.lower_bound_us == plan.predicted.step_us


@settings(max_examples=200, deadline=None)
@given(problems())
def test_a_plan_survives_its_own_check(problem: Problem) -> None:
    """What the solver returns, the independent verdict accepts, and the simulator takes as long as the closed form."""
    try:
        plan = solve(problem.profile, Request(inputs=problem.inputs))
    except InfeasibleError:
        return
    verdict = judge(plan, problem.profile, profile_digest=plan.inputs.profile.digest)
    assert verdict.fits, verdict.findings
    costs = costs_at(problem.profile, plan.micro_batch_size)
    partition, cluster = Partition.of(plan, costs.names), cluster_of(plan.inputs)
    tail_us = optimizer_us(costs, partition, cluster)
    simulated = max(event.end_us for event in timeline(costs, partition, cluster)) + tail_us
    assert step_us(costs, partition, cluster) == pytest.approx(simulated, rel=1e-9)
