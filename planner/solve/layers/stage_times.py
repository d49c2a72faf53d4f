"""Time that every stage needs to recompute layers: lower bounds first, exact values for stages in good plans.

`cheapest.py` finds the exact value for one stage, and explains the lower bound, a fractional knapsack.
"""

from typing import NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import most_bytes_freed, saved_and_peaks_without_recomputation
from planner.core.cost.memory import stage_memory_functions
from planner.core.cost.peak_points import PeakPoints
from planner.solve.layers.cheapest import RELATIVE, LayerChoice, cheapest_recomputed_layers
from planner.solve.space.tables import fill_stage_tables

_MOST_RATIOS = 64
"""Largest number of ratios of recomputation time to freed bytes in `least_recompute_us`. Fewer give weaker bounds."""


class _DeviceKey(NamedTuple):
    # Devices with equal keys share one table of recomputation times.
    limit_bytes: float
    in_flight: int


class RecomputeTimes:
    """Time that each stage needs to recompute layers so that it fits, if each device runs one stage.

    Times are for the profiled device. They are lower bounds until `solve_stage` makes them exact.
    """

    def __init__(self, costs: ChainCosts) -> None:
        self._costs = costs
        self._tables: dict[_DeviceKey, FloatArray] = {}
        self._exact: dict[_DeviceKey, dict[tuple[int, int], LayerChoice | None]] = {}

    @property
    def num_solved_stages(self) -> int:
        """Number of stages that `solve_stage` has solved so far."""
        return sum(map(len, self._exact.values()))

    def table(self, most_layers: int, limit_bytes: float, points: PeakPoints) -> FloatArray:
        """Return lower bounds of the recomputation time of each stage; infinite if the stage never fits.

        Entry [end, most_layers - n] is for the stage of the n layers before layer `end`.

        Args:
            most_layers: Number of layers of the longest stage.
            limit_bytes: Memory limit of the device minus its reserve, in bytes.
            points: Points in the step at which the memory of the device may peak.
        """
        device = _DeviceKey(limit_bytes, points.in_flight)
        table = self._tables.get(device)
        if table is None or table.shape[1] != most_layers:
            table = np.full((self._costs.num_layers + 1, most_layers), np.inf)
            fill_stage_tables(
                [table],
                lambda firsts, stop: [least_recompute_us(self._costs, firsts, stop, points, limit_bytes=limit_bytes)],
            )
            self._tables[device] = table
            for (first, end), choice in self._exact.get(device, {}).items():
                _set_entry(table, first, end, choice)
        return table

    def solve_stage(self, first: int, end: int, limit_bytes: float, points: PeakPoints) -> LayerChoice | None:
        """Return the layers of least recomputation time that make a stage fit; None if the stage never fits.

        Args:
            first: First layer of the stage.
            end: One past the last layer of the stage.
            limit_bytes: Memory limit of the device minus its reserve, in bytes.
            points: Points in the step at which the memory of the device may peak.
        """
        device = _DeviceKey(limit_bytes, points.in_flight)
        choices = self._exact.setdefault(device, {})
        if (first, end) not in choices:
            choice = choices[first, end] = cheapest_recomputed_layers(
                self._costs, first, end, points, limit_bytes=limit_bytes
            )
            if device in self._tables:
                _set_entry(self._tables[device], first, end, choice)
        return choices[first, end]


def _set_entry(table: FloatArray, first: int, end: int, choice: LayerChoice | None) -> None:
    column = first - end + table.shape[1]
    if column >= 0:
        table[end, column] = np.inf if choice is None else choice.lower_bound_us


def least_recompute_us(
    costs: ChainCosts, firsts: IntArray, stop: int, points: PeakPoints, *, limit_bytes: float
) -> FloatArray:
    """Return lower bounds of the recomputation time with which stages from `firsts` to at most `stop` fit.

    Args:
        costs: Costs of the layers.
        firsts: First layers of the stages, ascending.
        stop: Largest end of a stage (one past its last layer).
        points: Points in the step at which the memory of the device may peak.
        limit_bytes: Memory limit of the device minus its reserve, in bytes.

    Returns:
        Microseconds, one row per first layer and one column per last layer from `firsts[0]` to `stop - 1`; infinite if
        the stage never fits.

    Complexity: O(n (stop - firsts[0]) R) for n first layers. R is the number of different ratios of recomputation time
    to freed bytes, at most `_MOST_RATIOS`.
    """
    span = slice(int(firsts[0]), stop)
    saved, levels = saved_and_peaks_without_recomputation(costs, firsts, span)
    must_go = np.full(saved.shape, -np.inf)
    for function in stage_memory_functions(costs, firsts, stop, points):
        over = function.fixed - limit_bytes
        shares = function.weight
        if function.peak is not None:
            over = over + function.weight * saved + levels[function.peak]
            # An exact peak includes saved bytes: saving a byte less before the peak also lowers it.
            shares += costs.exact
        must_go = np.maximum(must_go, over / shares if shares else np.where(over > 0, np.inf, -np.inf))
    savings = np.stack(most_bytes_freed(costs))[:, span]
    least = _knapsack_bounds(savings, costs.forward_us[span], firsts - firsts[0], must_go)
    return least * (1 - RELATIVE)


def _knapsack_bounds(savings: FloatArray, times: FloatArray, rows: IntArray, must_go: FloatArray) -> FloatArray:
    # The optimum of a fractional knapsack for each stage, which has to save `must_go` bytes.

    def sums(per_layer: FloatArray) -> FloatArray:
        through: FloatArray = np.cumsum(per_layer[1])
        total: FloatArray = through[None, :] + (per_layer[0] - through)[rows][:, None]
        return total

    useful = savings > 0
    prices = np.unique((times / np.where(useful, savings, 1.0))[useful])
    if len(prices) > _MOST_RATIOS:
        prices = prices[np.linspace(0, len(prices) - 1, _MOST_RATIOS).round().astype(np.int64)]
    # Infinite bytes times a price of 0 would be undefined.
    finite = np.clip(must_go, -1e200, 1e200)
    least = np.zeros_like(must_go)
    # At any price of a byte, the time is at least the price of the bytes to save minus the profit of all layers.
    for price in prices:
        least = np.maximum(least, price * finite - sums(np.maximum(price * savings - times, 0.0)))
    return np.where(must_go <= sums(savings), least, np.inf)
