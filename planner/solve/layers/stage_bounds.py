"""What it takes at least to have the stages of a chain fit by recomputing single layers: for all stages at once.

`cheapest.py` finds the cheapest layers of one stage. Here only the bytes that must go are looked at, and
for each layer what it can save at most: a fractional knapsack.
"""

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import least_levels, most_savings
from planner.core.cost.memory import linear_moments
from planner.core.cost.moments import Moments
from planner.solve.layers.cheapest import RELATIVE
from planner.solve.space.arrays import FloatArray, IntArray

_MOST_RATIOS = 64
"""Different times per byte that `least_again_us` tries; if there are more, the bound is a little lower."""


def least_again_us(costs: ChainCosts, firsts: IntArray, stop: int, moments: Moments, *, cap_bytes: float) -> FloatArray:
    """Time below which no choice of recomputed layers makes a stage fit; infinite where none is known to do so.

    Stages whose first layer is one of `firsts`, which must ascend, and whose last is one of `firsts[0]`..`stop - 1`;
    other arguments as for `cheapest.py`. Only the bytes that must go are looked at, and for
    each layer what it can save at most: a fractional knapsack, as the maximum over prices of a byte.

    Returns:
        Shape (firsts, stop - firsts[0]), microseconds; values left of a row's own first layer mean nothing.

    Complexity: O(firsts · (stop - firsts[0]) · different ratios of time to bytes, at most 64).
    """
    span = slice(int(firsts[0]), stop)
    saved, levels = least_levels(costs, firsts, span)
    must_go = np.full(saved.shape, -np.inf)
    for moment in linear_moments(costs, firsts, stop, moments):
        over = moment.fixed - cap_bytes
        shares = moment.weight
        if moment.level is not None:
            over = over + moment.weight * saved + levels[moment.level]
            # A byte less in front of the highest level is one less there, too.
            shares += costs.exact
        must_go = np.maximum(must_go, over / shares if shares else np.where(over > 0, np.inf, -np.inf))
    savings = np.stack(most_savings(costs))[:, span]
    least = _least_times(savings, costs.forward_us[span], firsts - firsts[0], must_go)
    return least * (1 - RELATIVE)


def _least_times(savings: FloatArray, times: FloatArray, rows: IntArray, must_go: FloatArray) -> FloatArray:
    """The fractional knapsack of every stage, as the maximum over prices of a byte; infinite if all is not enough.

    `savings` has two rows: of a stage's first layer, and of the others.
    """

    def sums(per_layer: FloatArray) -> FloatArray:
        through: FloatArray = np.cumsum(per_layer[1])
        total: FloatArray = through[None, :] + (per_layer[0] - through)[rows][:, None]
        return total

    useful = savings > 0
    prices = np.unique((times / np.where(useful, savings, 1.0))[useful])
    if len(prices) > _MOST_RATIOS:
        prices = prices[np.linspace(0, len(prices) - 1, _MOST_RATIOS).round().astype(np.int64)]
    # What need not shrink at all, or cannot, is infinite, which is no number to multiply a price of 0 with.
    finite = np.clip(must_go, -1e200, 1e200)
    least = np.zeros_like(must_go)
    # By duality: at any price of a byte, what must go costs at least its worth less what layers gain by that price.
    for price in prices:
        least = np.maximum(least, price * finite - sums(np.maximum(price * savings - times, 0.0)))
    return np.where(must_go <= sums(savings), least, np.inf)
