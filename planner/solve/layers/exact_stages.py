"""What recomputing single layers costs for every stage: bounds first, exact values for the stages that matter."""

from typing import NamedTuple

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.moments import Moments
from planner.solve.layers.cheapest import LayerChoice, cheapest_layers
from planner.solve.layers.stage_bounds import least_again_us
from planner.solve.space.arrays import FloatArray
from planner.solve.space.tables import windowed


class _Device(NamedTuple):
    """What of a device decides which layers its stage recomputes."""

    cap_bytes: float
    in_flight: int
    """Micro-batches that wait for their backward, or run: the fewer stages are behind under 1F1B, the fewer."""


class LayerTimes:
    """Recomputation of single layers in the stages of a chain, on the profiled device, one stage to a device.

    Tables begin as lower bounds (`least_again_us`) and become exact stage by stage as `exact` is asked.
    """

    def __init__(self, costs: ChainCosts) -> None:
        self._costs = costs
        self._tables: dict[_Device, FloatArray] = {}
        self._exact: dict[_Device, dict[tuple[int, int], LayerChoice | None]] = {}

    @property
    def num_exact(self) -> int:
        """How many stages were solved exactly: what takes long."""
        return sum(map(len, self._exact.values()))

    def table(self, width: int, cap_bytes: float, moments: Moments) -> FloatArray:
        """Below the time to recompute so that each stage fits, shape (L+1, width); infinite where none does."""
        device = _Device(cap_bytes, moments.in_flight)
        table = self._tables.get(device)
        if table is None or table.shape[1] != width:
            (table,) = windowed(
                self._costs.num_layers,
                width,
                1,
                lambda firsts, stop: [least_again_us(self._costs, firsts, stop, moments, cap_bytes=cap_bytes)],
            )
            self._tables[device] = table
            for (first, end), choice in self._exact.get(device, {}).items():
                _enter(table, first, end, choice)
        return table

    def exact(self, first: int, end: int, cap_bytes: float, moments: Moments) -> LayerChoice | None:
        """The cheapest layers to recompute, which the tables hold from now on; None if the stage never fits."""
        device = _Device(cap_bytes, moments.in_flight)
        choices = self._exact.setdefault(device, {})
        if (first, end) not in choices:
            choice = choices[first, end] = cheapest_layers(self._costs, first, end, moments, cap_bytes=cap_bytes)
            if device in self._tables:
                _enter(self._tables[device], first, end, choice)
        return choices[first, end]


def _enter(table: FloatArray, first: int, end: int, choice: LayerChoice | None) -> None:
    column = first - end + table.shape[1]
    if column >= 0:
        table[end, column] = np.inf if choice is None else choice.lower_bound_us
