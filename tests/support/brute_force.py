"""The oracle: every partition of a small chain, judged by the cost model's own evaluation and by the simulator."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from planner.core.costs import costs_at, covers
from planner.core.evaluate import Partition, stages_of, step_us
from planner.core.plan import Inputs, Recompute
from planner.core.planning import cluster_of
from planner.core.profile import Profile

ALL_CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")


def partitions(num_layers: int, max_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut `num_layers` layers into 1..max_stages stages, as balances."""
    for num_stages in range(1, max_stages + 1):
        for cuts in combinations(range(1, num_layers), num_stages - 1):
            bounds = (0, *cuts, num_layers)
            yield tuple(b - a for a, b in pairwise(bounds))


def best_step_us(profile: Profile, inputs: Inputs, micro_batches: int | None = None) -> float | None:
    """Smallest step time over everything the solver may choose, or None if nothing fits."""
    cluster = cluster_of(inputs)
    allowed = ALL_CHOICES if inputs.recompute == "auto" else (inputs.recompute,)
    best: float | None = None
    for m in range(1, inputs.batch + 1):
        size = inputs.batch // m
        if inputs.batch % m or micro_batches not in (None, m):
            continue
        if not covers(profile, size, extrapolate=inputs.extrapolate):
            continue
        costs = costs_at(profile, size, extrapolate=inputs.extrapolate)
        for balance in partitions(len(profile.layers), inputs.devices):
            for recompute in product(allowed, repeat=len(balance)):
                partition = Partition(schedule="gpipe", micro_batches=m, balance=balance, recompute=recompute)
                if all(s.memory.total <= s.memory_bytes for s in stages_of(costs, partition, cluster)):
                    time = step_us(costs, partition, cluster)
                    best = time if best is None else min(best, time)
    return best
