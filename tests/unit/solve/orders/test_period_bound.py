"""Lower bound of searched schedules: at most every plan, above the time of the work."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.stage_time import CHOICES
from planner.core.schedule import Action
from planner.core.schedule.listed import format_orders
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of

M = 2
ORDERS = ("FFIIWW", "FFIWIW", "FIFIWW", "FIFWIW", "FIWFIW")
"""All orders of F, I and W of two micro-batches that keep the micro-batches of each kind in order."""


def row(stage: int, kinds: str) -> tuple[Action, ...]:
    """Return the actions of one stage."""
    seen = dict.fromkeys("FIW", -1)
    actions = []
    for kind in kinds:
        seen[kind] += 1
        actions.append(Action(stage, kind, seen[kind]))
    return tuple(actions)


def fastest_us(profile: Profile, inputs: Inputs) -> tuple[float, float]:
    """Return the step time of the fastest plan that fits, by brute force, and the time of its work."""
    costs, cluster, best = costs_at(profile, 1), inputs.cluster, float("inf")
    num_layers = len(profile.layers)
    for num_devices in (1, 2):
        for inner in combinations(range(1, num_layers), num_devices - 1):
            balance = tuple(end - first for first, end in pairwise((0, *inner, num_layers)))
            for kinds, recompute in product(product(ORDERS, repeat=num_devices), product(CHOICES, repeat=num_devices)):
                partition = Partition(
                    schedule="search",
                    micro_batches=M,
                    balance=balance,
                    recompute=recompute,
                    order=format_orders([row(stage, order) for stage, order in enumerate(kinds)]),
                )
                try:
                    time_us = Evaluation(costs, partition, cluster).step_us
                except ValueError:
                    continue  # they wait for each other
                if time_us >= best:
                    continue
                stages = Evaluation(costs, partition, cluster).stages
                if all(stage.memory.total <= stage.memory_bytes for stage in stages):
                    best = time_us
    work_us = float((costs.forward_us + costs.split_backward.input_us + costs.split_backward.weight_us).sum())
    return best, M * work_us / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_bound_is_at_most_every_plan_and_above_the_work(seed: int) -> None:
    """Memory limits require recomputation."""
    profile = random_profile(seed, 4, exact=seed % 2 == 0)
    free = inputs_of(2, M, link=Link(latency_us=3.0, bytes_per_s=1e6))
    needed = solve(profile, Request(inputs=replace(free, schedule="gpipe"), micro_batches=M)).peak_bytes_by_device()
    inputs = replace(free, memory_bytes=(round(0.9 * max(needed)),) * 2, schedule="search", chunks=1)
    best_us, work_us = fastest_us(profile, inputs)
    plan = solve(profile, Request(inputs=inputs, micro_batches=M))
    assert work_us * (1 + 1e-6) < plan.solver.lower_bound_us <= best_us * (1 + 1e-9)
    assert best_us <= plan.predicted.step_us * (1 + 1e-9)
