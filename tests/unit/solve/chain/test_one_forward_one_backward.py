"""1F1B and interleaved: the bounds that prove a plan are below every plan there is."""

from dataclasses import replace

import pytest

from planner.core.values.cluster import Link
from planner.core.values.plan import RecomputePolicy
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.chain.chain_dp import LabelSearch
from planner.solve.chain.recurrences import OneForwardOneBackwardRecurrence
from tests.support.brute_force import Space
from tests.support.chains import chain, layer, random_profile
from tests.support.profiles import inputs_of


def test_the_micro_batch_that_except_last_spares_counts_in_the_bound() -> None:
    """Two layers on one device: of 30 + 30 us of recomputation only the first micro-batch pays, and a cut costs 50 us.

    A bound in which every micro-batch pays rules the single stage (200 us) out, and "proves" two stages (250 us).
    """
    profile = chain(layer("a", forward_us=30.0), layer("b", forward_us=30.0, backward_us=10.0))
    inputs = replace(inputs_of(2, 2, recompute="except-last", link=Link(latency_us=50.0)), schedule="1f1b")
    plan = solve(profile, Request(inputs=inputs))
    assert (plan.balance, plan.predicted.step_us, plan.solver.status) == ((2,), 200.0, "optimal")


@pytest.mark.parametrize("policy", ["auto", "never", "except-last", "always"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_1f1b_is_below_every_plan(seed: int, policy: RecomputePolicy) -> None:
    """For each M and number of stages, on devices and links that differ, before anything is searched and after it."""
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
            search = LabelSearch(case.problem(count, width=6, exact=True), recurrence)
            found = search.find_best()
            assert search.root_bound_us() <= min(times) * (1 + 1e-9)
            assert (found is None) == (min(times) == float("inf"))
            assert found is None or found.step_us <= min(times) * (1 + 1e-9)
            assert case.bound_us <= min(times) * (1 + 1e-9)
