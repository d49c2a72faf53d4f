"""Chains with published layer times: the largest stage is as small as in the papers."""

import random
from itertools import accumulate, combinations, pairwise

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.solve import Request, solve
from tests.support.chains import AMOEBANET_BACKWARD_MS, AMOEBANET_FORWARD_MS, VGG16_MS
from tests.support.profiles import inputs_of, profile_of

AMOEBANET_MS = tuple(f + b for f, b in zip(AMOEBANET_FORWARD_MS, AMOEBANET_BACKWARD_MS, strict=True))


def balances(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Return every partition of a chain into `num_stages` stages."""
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]


def largest(times: tuple[float, ...], balance: tuple[int, ...]) -> float:
    """Return the time of the largest stage."""
    return max(sum(times[a:b]) for a, b in pairwise(accumulate(balance, initial=0)))


def smallest_largest(times: tuple[float, ...], num_stages: int) -> float:
    """Return the smallest possible largest stage, by the textbook recursion over prefixes."""
    sums = list(accumulate(times, initial=0.0))
    best = [0.0] + [float("inf")] * len(times)
    for _ in range(num_stages):
        best = [0.0] + [min(max(best[i], sums[j] - sums[i]) for i in range(j)) for j in range(1, len(times) + 1)]
    return best[-1]


def planned_largest(times: tuple[float, ...], num_stages: int) -> float:
    """Return the largest stage of a plan with so many micro-batches that only the largest stage matters."""
    profile = profile_of([1000 * t for t in times])
    plan = solve(profile, Request(inputs=inputs_of(num_stages, 10_000), micro_batches=10_000))
    assert plan.solver.status == "optimal"
    assert sum(plan.balance) == len(times)
    return max(stage.forward_us for stage in plan.stages) / 1000


@pytest.mark.parametrize(
    ("times", "num_stages", "published"),
    [
        (AMOEBANET_MS, 2, 359.94),
        (AMOEBANET_MS, 4, 181.33),
        (AMOEBANET_MS, 8, 99.30),
        (VGG16_MS, 2, 370.931),
        (VGG16_MS, 4, 216.450),
        (VGG16_MS, 8, 159.531),
    ],
    ids=["amoebanet-2", "amoebanet-4", "amoebanet-8", "vgg16-2", "vgg16-4", "vgg16-8"],
)
def test_largest_stage_equals_the_published_one(times: tuple[float, ...], num_stages: int, published: float) -> None:
    """F + B counts as one pass and M = 10,000, so the step is the largest stage."""
    assert smallest_largest(times, num_stages) == pytest.approx(published, abs=1e-6)
    assert planned_largest(times, num_stages) == pytest.approx(published, abs=1e-6)


def test_published_chains_are_complete() -> None:
    assert (len(AMOEBANET_FORWARD_MS), len(AMOEBANET_BACKWARD_MS), len(VGG16_MS)) == (24, 24, 40)
    assert sum(AMOEBANET_MS) == pytest.approx(717.81)
    assert sum(VGG16_MS) == pytest.approx(672.535)
    assert smallest_largest(VGG16_MS, 40) == max(VGG16_MS) == 159.531


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 32])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_plan_with_separate_forward_and_backward_equals_brute_force(num_stages: int, micro_batches: int) -> None:
    profile = profile_of(AMOEBANET_FORWARD_MS, AMOEBANET_BACKWARD_MS)
    inputs = inputs_of(num_stages, micro_batches)
    plan = solve(profile, Request(inputs=inputs))
    costs, cluster = costs_at(profile, 1), inputs.cluster
    times = [
        Evaluation(costs, partition_of(balance, micro_batches), cluster).step_us
        for k in range(1, num_stages + 1)
        for balance in balances(24, k)
    ]
    assert len(times) == {2: 24, 3: 277}[num_stages]
    assert plan.predicted.step_us == pytest.approx(min(times), rel=1e-12)


def partition_of(balance: tuple[int, ...], micro_batches: int) -> Partition:
    """Return a GPipe partition without recomputation."""
    return Partition(
        schedule="gpipe", micro_batches=micro_batches, balance=balance, recompute=("never",) * len(balance)
    )


def test_no_min_max_partition_of_forward_plus_backward_is_faster() -> None:
    """All equally good min-max partitions are compared.

    On some chains they are more than 1 % slower, because the maxima of F and B are separate.
    """
    rng = random.Random(2)
    chains = [(AMOEBANET_FORWARD_MS, AMOEBANET_BACKWARD_MS)]
    for _ in range(12):
        forward = tuple(rng.uniform(1, 20) for _ in range(14))
        chains.append((forward, tuple(f * rng.uniform(0.5, 4.0) for f in forward)))
    ratios = []
    for forward, backward in chains:
        both = tuple(f + b for f, b in zip(forward, backward, strict=True))
        profile = profile_of(forward, backward)
        inputs = inputs_of(4, 16)
        plan = solve(profile, Request(inputs=inputs))
        costs, cluster = costs_at(profile, 1), inputs.cluster
        found = smallest_largest(both, 4)
        min_max = [b for b in balances(len(both), 4) if largest(both, b) <= found * (1 + 1e-12)]
        assert min_max
        for balance in min_max:
            time = Evaluation(costs, partition_of(balance, 16), cluster).step_us
            assert plan.predicted.step_us <= time * (1 + 1e-12)
            ratios.append(time / plan.predicted.step_us)
    assert max(ratios) > 1.01
