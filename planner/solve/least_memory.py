"""Cuts that need little memory under schedules that hold what only their lists tell: for advice where nothing fits.

What a device holds of several stages, or under lists that put off halves of backwards, is no sum over stages, so that
no programme finds the least. A search downhill from even cuts finds little: enough to say what would do, not what is
least.
"""

from collections.abc import Sequence

import numpy as np

from planner.solve.space.arrays import FloatArray, IntArray
from planner.solve.space.case import Case
from planner.solve.space.partitions import Many, moved
from planner.solve.space.tables import allowed_choices

_MOST_ACTIONS = 20_000
"""Of a step; beyond it nothing is looked for: advice may not take longer than the answer."""

_ROUNDS = 100


def over_bytes_found(case: Case) -> float:
    """By how much the worst device is over its cap in the best partition found, in bytes, on any number of devices.

    0 where one fits; infinite where none was found that keeps the rules, or there is too much to look at.

    Complexity: O(K V) partitions in each of at most 100 rounds, for every number of devices and kind of recomputation.
    """
    least = np.inf
    for num_devices in range(case.num_devices, 0, -1):
        if least > 0:
            least = min(least, _over_bytes_on(Many(case, num_devices)))
    return float(least)


def _over_bytes_on(many: Many) -> float:
    """The same on so many devices."""
    case, num_layers, num_stages = many.case, many.case.costs.num_layers, many.num_stages
    if many.num_actions > _MOST_ACTIONS or not many.can_run:
        return np.inf
    balance = case.rules.balance
    cuts = np.cumsum([0, *balance]) if balance else np.linspace(0, num_layers, num_stages + 1).astype(np.int64)
    allowed = allowed_choices(case.policy, case.micro_batches)
    return min(_downhill(many, cuts, np.full(num_stages, choice), allowed) for choice in allowed)


def _downhill(many: Many, cuts: IntArray, choices: IntArray, allowed: Sequence[int]) -> float:
    """Moves a cut, or has a stage recomputed otherwise, as long as the worst device then needs less."""
    least = _over(many, cuts[None], choices[None])[0]
    for _ in range(_ROUNDS):
        if least <= 0:
            break
        other_cuts = cuts[None][:0] if many.case.rules.balance else moved(cuts)
        changed = [
            (*choices[:s], n, *choices[s + 1 :]) for s in range(len(choices)) for n in allowed if n != choices[s]
        ]
        every_cuts = np.concatenate([other_cuts, np.repeat(cuts[None], len(changed), axis=0)])
        kept = np.repeat(choices[None], len(other_cuts), axis=0)
        every_choice = np.concatenate([kept, np.array(changed, dtype=np.int64).reshape(-1, len(choices))])
        if not len(every_cuts):
            break
        over = _over(many, every_cuts, every_choice)
        at = int(np.argmin(over))
        if not over[at] < least:
            break
        least, cuts, choices = over[at], every_cuts[at], every_choice[at]
    return float(least)


def _over(many: Many, cuts: IntArray, choices: IntArray) -> FloatArray:
    """Over the caps, infinite where a rule is broken; shape (N,)."""
    return np.where(many.case.rules.allows(cuts), many.over_bytes(cuts, choices).max(axis=1), np.inf)
