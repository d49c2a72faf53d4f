"""Lower bounds under 1F1B: at most the step time of every plan."""

from dataclasses import replace

import pytest

from planner.core.values.cluster import Link
from planner.core.values.plan import RecomputePolicy
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.chain.chain_dp import CutDynamicProgram
from planner.solve.chain.recurrences import OneForwardOneBackwardRecurrence
from tests.support.brute_force import Space
from tests.support.chains import chain, layer, random_profile
from tests.support.profiles import inputs_of


def test_bound_counts_the_micro_batch_that_except_last_does_not_recompute() -> None:
    """Two layers on one device recompute only the first micro-batch (30 + 30 us); a cut costs 50 us.

    A bound with recomputation of every micro-batch would exclude the single stage (200 us) and "prove" two stages (250
    us).
    """
    profile = chain(layer("a", forward_us=30.0), layer("b", forward_us=30.0, backward_us=10.0))
    inputs = replace(inputs_of(2, 2, recompute="except-last", link=Link(latency_us=50.0)), schedule="1f1b")
    plan = solve(profile, Request(inputs=inputs))
    assert (plan.balance, plan.predicted.step_us, plan.solver.status) == ((2,), 200.0, "optimal")


@pytest.mark.parametrize("policy", ["auto", "never", "except-last", "always"])
@pytest.mark.parametrize("seed", range(4))
def test_bound_under_1f1b_is_at_most_every_plan(seed: int, policy: RecomputePolicy) -> None:
    """Every M and number of stages is tried, before and after the search."""
    profile = random_profile(seed, 6, sizes=(1, 4))
    link = Link(latency_us=5.0, bytes_per_s=1e7, blocking=seed % 2 == 0)
    inputs = replace(
        inputs_of(3, 4, recompute=policy, link=link, memory_bytes=(9000, 6000, 9000)),
        schedule="1f1b",
        speeds=(1.0, 2.0, 0.5),
    )
    space = Space(profile, inputs)
    for case in cases_of(profile, Request(inputs=inputs)):
        recurrence = OneForwardOneBackwardRecurrence(case.micro_batches)
        for count in range(1, case.num_devices + 1):
            times = [
                float(block.step_us[block.fits(space.caps)].min(initial=float("inf")))
                for block in space.blocks
                if (block.micro_batches, block.num_devices) == (case.micro_batches, count)
            ]
            search = CutDynamicProgram(case.chain_problem(count, most_layers=6, is_count_exact=True), recurrence)
            found = search.find_best()
            assert search.lower_bound_us() <= min(times) * (1 + 1e-9)
            assert (found is None) == (min(times) == float("inf"))
            assert found is None or found.step_us <= min(times) * (1 + 1e-9)
            assert case.bound_us <= min(times) * (1 + 1e-9)
