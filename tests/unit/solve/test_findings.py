"""Gains of planning for the actual schedule: separate maxima, the best M, the fastest schedule."""

from dataclasses import replace

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.values.plan import Plan, ScheduleName
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from tests.support.brute_force import partitions
from tests.support.chains import AMOEBANET_BACKWARD_MS, AMOEBANET_FORWARD_MS, chain, layer
from tests.support.profiles import inputs_of, profile_of


def under(profile: Profile, plan: Plan, schedule: ScheduleName) -> float:
    """Return the step time of the plan's cuts, M and recomputation under another schedule."""
    partition = replace(Partition.of(plan, [one.name for one in profile.layers]), schedule=schedule)
    return Evaluation(costs_at(profile, plan.micro_batch_size), partition, plan.inputs.cluster).step_us


def test_chosen_m_is_faster_than_the_largest() -> None:
    """Each layer costs 0.5 ms per micro-batch, so M = 64 has the smallest bubble but is over 1.2 times slower."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    layers = [
        layer(
            f"h.{n}",
            forward_us=tuple(500.0 + 300.0 * size for size in sizes),
            backward_us=tuple(500.0 + 600.0 * size for size in sizes),
            output_bytes=(0,) * len(sizes),
            saved_bytes=(0,) * len(sizes),
        )
        for n in range(24)
    ]
    profile, inputs = chain(*layers, sizes=sizes), inputs_of(4, 64)
    chosen = solve(profile, Request(inputs=inputs))
    largest = solve(profile, Request(inputs=inputs, micro_batches=64))
    assert 1 < chosen.micro_batches < 64
    assert chosen.predicted.ideal_bubble > largest.predicted.ideal_bubble
    assert largest.predicted.step_us > 1.2 * chosen.predicted.step_us


def test_min_max_cuts_of_a_frozen_backbone_are_slower() -> None:
    """The first 40 of 64 layers have no backward."""
    forward, backward = [1.0] * 64, [0.0] * 40 + [2.0] * 24
    profile, inputs = profile_of(forward, backward), inputs_of(4, 16)
    plan = solve(profile, Request(inputs=inputs))
    assert (plan.micro_batches, plan.solver.status) == (16, "optimal")
    costs, cluster = costs_at(profile, 1), inputs.cluster
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    sums = [sum(both[:n]) for n in range(65)]

    def largest(balance: tuple[int, ...]) -> float:
        ends = [sum(balance[: k + 1]) for k in range(len(balance))]
        return max(sums[end] - sums[end - count] for end, count in zip(ends, balance, strict=True))

    every = [balance for balance in partitions(64, 4) if len(balance) == 4]
    smallest = min(map(largest, every))
    min_max = [balance for balance in every if largest(balance) == smallest]
    assert min_max
    times = [
        Evaluation(
            costs, Partition(schedule="gpipe", micro_batches=16, balance=balance, recompute=("never",) * 4), cluster
        ).step_us
        for balance in min_max
    ]
    assert min(times) > 1.1 * plan.predicted.step_us


@pytest.mark.parametrize(
    ("forward", "backward", "devices", "batch", "lost"),
    [
        ([30, 10, 10, 10], [20, 20, 20, 60], 2, 32, 1.08),
        ([30, 30, 30, 20, 20, 60, 30, 10], [10, 10, 10, 20, 80, 10, 40, 80], 3, 16, 1.03),
    ],
)
def test_best_cuts_differ_between_gpipe_and_1f1b(forward, backward, devices, batch, lost):
    """GPipe waits for the largest forward and the largest backward, 1F1B for the largest sum of one stage."""
    profile, inputs = profile_of(forward, backward), inputs_of(devices, batch)
    gpipe = solve(profile, Request(inputs=inputs))
    other = solve(profile, Request(inputs=replace(inputs, schedule="1f1b")))
    assert gpipe.solver.status == other.solver.status == "optimal"
    assert gpipe.balance != other.balance
    assert under(profile, gpipe, "1f1b") > lost * other.predicted.step_us
    assert under(profile, other, "gpipe") > lost * gpipe.predicted.step_us


@pytest.mark.parametrize("devices", [2, 4])
def test_plan_for_one_schedule_is_never_faster_under_the_other(devices: int) -> None:
    profile, inputs = profile_of(AMOEBANET_FORWARD_MS, AMOEBANET_BACKWARD_MS), inputs_of(devices, 16)
    gpipe = solve(profile, Request(inputs=inputs))
    other = solve(profile, Request(inputs=replace(inputs, schedule="1f1b")))
    assert under(profile, gpipe, "1f1b") >= other.predicted.step_us * (1 - 1e-9)
    assert under(profile, other, "gpipe") >= gpipe.predicted.step_us * (1 - 1e-9)


def test_auto_is_as_fast_as_the_fastest_schedule() -> None:
    profile = profile_of(AMOEBANET_FORWARD_MS[:8], AMOEBANET_BACKWARD_MS[:8])
    inputs = replace(inputs_of(3, 6), chunks=2)
    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved")
    times = {
        schedule: solve(
            profile, Request(inputs=replace(inputs, schedule=schedule, chunks=2 if schedule == "interleaved" else 1))
        ).predicted.step_us
        for schedule in schedules
    }
    chosen = solve(profile, Request(inputs=replace(inputs, schedule="auto")))
    assert chosen.predicted.step_us == min(times.values())
    assert chosen.schedule == min(times, key=lambda schedule: times[schedule])
