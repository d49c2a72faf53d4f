"""Time to recompute single layers in every stage: lower bounds first, exact values for the stages that matter.

`cheapest.py` finds the exact value of one stage. The bounds only look at the bytes that must go, and for each layer at
the most that it can save: a fractional knapsack.
"""

from typing import NamedTuple

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import least_levels, most_savings
from planner.core.cost.memory import linear_moments
from planner.core.cost.moments import Moments
from planner.solve.layers.cheapest import RELATIVE, LayerChoice, cheapest_layers
from planner.solve.space.arrays import FloatArray, IntArray
from planner.solve.space.tables import windowed

_MOST_RATIOS = 64
"""Different times per byte that `least_recompute_us` tries; if there are more, the bound is a little lower."""


class _DeviceKey(NamedTuple):
    """What of a device decides which layers its stage recomputes."""

    limit_bytes: float
    in_flight: int
    """Micro-batches that wait for their backward, or run: the fewer stages are behind under 1F1B, the fewer."""


class RecomputeTimes:
    """Recomputation of single layers in the stages of a chain, on the profiled device, one stage to a device.

    Tables begin as lower bounds (`least_recompute_us`) and become exact stage by stage, by `solve_stage`.
    """

    def __init__(self, costs: ChainCosts) -> None:
        self._costs = costs
        self._tables: dict[_DeviceKey, FloatArray] = {}
        self._exact: dict[_DeviceKey, dict[tuple[int, int], LayerChoice | None]] = {}

    @property
    def num_exact(self) -> int:
        """How many stages were solved exactly: what takes long."""
        return sum(map(len, self._exact.values()))

    def table(self, width: int, limit_bytes: float, moments: Moments) -> FloatArray:
        """Below the time to recompute so that each stage fits, shape (L+1, width); infinite where none does."""
        device = _DeviceKey(limit_bytes, moments.in_flight)
        table = self._tables.get(device)
        if table is None or table.shape[1] != width:
            (table,) = windowed(
                self._costs.num_layers,
                width,
                1,
                lambda firsts, stop: [least_recompute_us(self._costs, firsts, stop, moments, limit_bytes=limit_bytes)],
            )
            self._tables[device] = table
            for (first, end), choice in self._exact.get(device, {}).items():
                _set_entry(table, first, end, choice)
        return table

    def solve_stage(self, first: int, end: int, limit_bytes: float, moments: Moments) -> LayerChoice | None:
        """The cheapest layers to recompute, which the tables hold from now on; None if the stage never fits."""
        device = _DeviceKey(limit_bytes, moments.in_flight)
        choices = self._exact.setdefault(device, {})
        if (first, end) not in choices:
            choice = choices[first, end] = cheapest_layers(self._costs, first, end, moments, limit_bytes=limit_bytes)
            if device in self._tables:
                _set_entry(self._tables[device], first, end, choice)
        return choices[first, end]


def _set_entry(table: FloatArray, first: int, end: int, choice: LayerChoice | None) -> None:
    column = first - end + table.shape[1]
    if column >= 0:
        table[end, column] = np.inf if choice is None else choice.lower_bound_us


def least_recompute_us(
    costs: ChainCosts, firsts: IntArray, stop: int, moments: Moments, *, limit_bytes: float
) -> FloatArray:
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
        over = moment.fixed - limit_bytes
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
