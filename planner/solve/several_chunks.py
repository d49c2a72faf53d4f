"""Interleaved 1F1B: all partitions are simulated where they are few, else one is improved step by step.

Chunks of a device share its memory, so stages are not judged one by one, and the only bound is what the work alone
takes. A search downhill goes from even shares to the nearest partition of which no neighbour is better: one with a
single cut moved, or a single stage recomputed otherwise. As long as it does not fit, better means fewer bytes over the
caps, from then on faster.

Complexity: O(V K M) for every block of partitions that are simulated at once, and O(V K) of them in a round downhill.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from math import comb, inf

import numpy as np

from planner.core.cost.chain_costs import sums_before
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE
from planner.core.values.cluster import Cluster
from planner.solve.arrays import BoolArray, FloatArray, IntArray
from planner.solve.case import Case
from planner.solve.chain_dp import LabelSearch
from planner.solve.laws import GPipeLaw
from planner.solve.many import Many, moved
from planner.solve.progress import BLOCK, Progress
from planner.solve.tables import allowed_choices

__all__ = ["search_several_chunks"]

_PROMISING = 1.15
"""A plan begins to be improved if it is not slower than the best by more than this."""

_ORDER, _MOMENTS = 3, 10
"""What it costs to find the order of a schedule's actions, and when chunks hold most: in blocks of few partitions."""

_CELLS = 5
"""Chunks in tables that take as long to work out as one action."""

_ROUNDS = 200
_CUTS_AT_ONCE = 256


def search_several_chunks(progress: Progress) -> None:
    """Searches all numbers of devices, until the deadline (`OutOfTimeError`) or for as long as the effort lasts."""
    case, effort = progress.case, progress.effort
    progress.deadline.check()
    # A layer may need less within a stage than by itself, but never less than what it holds all the time.
    if float((case.costs.state.always + case.costs.gradients).max()) > max(case.caps_bytes):
        return
    choices = allowed_choices(case.policy, case.micro_batches)
    for num_devices in range(case.num_devices, 0, -1):
        least_us = max(progress.least_us(num_devices), case.bound_us)
        if least_us >= progress.upper_us:
            return
        many = Many(case, num_devices)
        cells = (case.costs.num_layers + 1) * many.width * len(choices)
        if not effort.pays((_ORDER + _MOMENTS + 1) * many.num_actions, cells // _CELLS):
            progress.leave_out(least_us)
            return
        if not _can_run(many):
            continue
        effort.spent += (_ORDER + _MOMENTS) * many.num_actions if effort.is_bounded else 0
        if not _simulate_all(progress, many, choices):
            _improve(progress, many, np.array(choices))
            progress.leave_out(least_us)


def _can_run(many: Many) -> bool:
    """Whether the schedule runs with so many devices, and so many stages are wanted of the layers."""
    try:
        many.actions  # noqa: B018 - raises where it does not
    except UsageError:
        return False
    # Cuts that are fixed are for one number of stages.
    balance = many.case.rules.balance
    return many.case.costs.num_layers >= many.num_stages and (not balance or len(balance) == many.num_stages)


def _simulate_all(progress: Progress, many: Many, allowed: list[int]) -> bool:
    """Simulates every partition with every recomputation; False if they are too many."""
    num_layers, num_stages = many.case.costs.num_layers, many.num_stages
    balance = many.case.rules.balance
    num_cuts = comb(num_layers - 1, num_stages - 1) if balance is None else 1
    if num_cuts * len(allowed) ** num_stages > progress.effort.affordable(many):
        return False
    inner = combinations(range(1, num_layers), num_stages - 1) if balance is None else [np.cumsum(balance[:-1])]
    # Every recomputation of every stage with each of the cuts.
    options = np.array(list(product(allowed, repeat=num_stages)))
    for block in _blocks((0, *cuts, num_layers) for cuts in inner):
        cuts = block[_wanted(many.case, block)]
        every, choices = np.repeat(cuts, len(options), axis=0), np.tile(options, (len(cuts), 1))
        for start in range(0, len(every), BLOCK):
            part = slice(start, start + BLOCK)
            fits = many.over_bytes(every[part], choices[part]) <= 0
            progress.raced(many, every[part], choices[part], fits)
    return True


def _blocks(all_cuts: Iterable[tuple[int, ...]]) -> Iterator[IntArray]:
    rest = iter(all_cuts)
    while block := list(islice(rest, _CUTS_AT_ONCE)):
        yield np.array(block)


def _improve(progress: Progress, many: Many, allowed: IntArray) -> None:
    """Goes downhill from fairly even cuts, with the same recomputation everywhere to begin with."""
    start = _start(progress, many)
    if start is None:
        return
    for choice in allowed:
        # The more is recomputed to begin with, the slower: the first that leads to what fits is enough.
        if _descend(progress, many, (start[None], np.full((1, many.num_stages), choice)), allowed):
            return


def _start(progress: Progress, many: Many) -> IntArray | None:
    """Fairly even cuts that are wanted; None where there are none."""
    case, num_stages = many.case, many.num_stages
    even = _even(sums_before(case.costs.forward_us + case.costs.backward_us), num_stages)
    if _wanted(case, even[None])[0]:
        return even
    # As a pipeline of single stages, in which everything fits, it has the same rules and the same shares.
    roomy = Cluster(memory_bytes=(2**62,) * num_stages)
    single = replace(case, schedule=GPIPE, chunks=1, num_devices=num_stages, replicas=1, cluster=roomy)
    problem = single.problem(num_stages, width=case.costs.num_layers, exact=True)
    cuts = LabelSearch(problem, GPipeLaw(case.micro_batches), deadline=progress.deadline).min_max("backward")
    return None if cuts is None else np.array(cuts)


def _descend(progress: Progress, many: Many, start: tuple[IntArray, IntArray], allowed: IntArray) -> bool:
    """Goes from one partition, its cuts and choices, downhill; whether one that fits was reached."""
    cuts, choices = start
    before = (inf, inf)
    for _ in range(_ROUNDS):
        progress.deadline.check()
        # First of all what breaks the rules goes, then what is over by more than the best, then what is slower.
        over = np.where(_wanted(many.case, cuts), np.maximum(many.over_bytes(cuts, choices), 0.0), inf)
        least = float(over.min())
        if least == inf:
            break
        near = np.flatnonzero(over <= least)
        if least > 0:
            near = near[:1]  # how fast it is does not matter yet
            step_us = progress.simulated(many, cuts[near], choices[near])
        else:
            step_us = progress.raced(many, cuts[near], choices[near], np.full(len(near), True))
        at = int(np.argmin(step_us))
        now = (least, float(step_us[at]))
        # No neighbour is better, or there is nothing left to look for one with.
        if not now < before or progress.effort.left <= 0:
            break
        before = now
        # What makes it fit makes it no faster.
        if now[1] > progress.upper_us * _PROMISING:
            break
        cuts, choices = _neighbours(cuts[near[at]], choices[near[at]], allowed, fits=least == 0)
        if not len(cuts):
            break
    return before[0] == 0


def _neighbours(cuts: IntArray, choices: IntArray, allowed: IntArray, *, fits: bool) -> tuple[IntArray, IntArray]:
    """All partitions with one cut moved, or with one stage's recomputation changed."""
    other_cuts = moved(cuts)
    # Where everything fits without recomputation, none helps.
    stages = range(len(choices) if not fits or choices.any() else 0)
    changed = [(*choices[:k], n, *choices[k + 1 :]) for k in stages for n in allowed if n != choices[k]]
    other_choices = np.array(changed, dtype=np.int64).reshape(len(changed), len(choices))
    return (
        np.concatenate([other_cuts, np.repeat(cuts[None], len(other_choices), axis=0)]),
        np.concatenate([np.repeat(choices[None], len(other_cuts), axis=0), other_choices]),
    )


def _wanted(case: Case, cuts: IntArray) -> BoolArray:
    """Which partitions keep the rules, shape (N,)."""
    return ~np.asarray(case.rules.forbids(cuts[:, :-1], cuts[:, 1:]).any(axis=1))


def _even(before: FloatArray, num_stages: int) -> IntArray:
    """Cuts at the even shares of the work, no stage empty."""
    num_layers = len(before) - 1
    cuts = np.searchsorted(before, np.linspace(0, before[-1], num_stages + 1))
    cuts[0], cuts[-1] = 0, num_layers
    # Every cut lies at least one layer behind the one in front, and leaves a layer for each stage behind it.
    places = np.arange(num_stages + 1)
    cuts = np.maximum.accumulate(cuts - places) + places
    even: IntArray = np.minimum(cuts, num_layers - num_stages + places)
    return even
