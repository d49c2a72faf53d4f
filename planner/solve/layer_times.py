"""What recomputing single layers costs for every stage: bounds first, exact values for the stages that matter."""

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.moments import stage_moments
from planner.core.schedule import GPIPE
from planner.solve.arrays import FloatArray
from planner.solve.layerwise import LayerChoice, cheapest_layers, least_again_us
from planner.solve.tables import windowed


class LayerTimes:
    """Recomputation of single layers in the stages of a chain, on the profiled device, under GPipe.

    Tables begin as lower bounds (`least_again_us`) and become exact stage by stage as `exact` is asked.
    """

    def __init__(self, costs: ChainCosts, micro_batches: int) -> None:
        self._costs = costs
        self._moments = stage_moments(GPIPE, micro_batches=micro_batches)
        self._tables: dict[float, FloatArray] = {}
        self._exact: dict[tuple[float, int, int], LayerChoice | None] = {}

    def table(self, width: int, cap_bytes: float) -> FloatArray:
        """Below the time to recompute so that each stage fits, shape (L+1, width); infinite where none does."""
        table = self._tables.get(cap_bytes)
        if table is None or table.shape[1] != width:
            (table,) = windowed(
                self._costs.num_layers,
                width,
                1,
                lambda firsts, stop: [least_again_us(self._costs, firsts, stop, self._moments, cap_bytes=cap_bytes)],
            )
            self._tables[cap_bytes] = table
            for (cap, first, end), choice in self._exact.items():
                if cap == cap_bytes:
                    self._enter(table, first, end, choice)
        return table

    def exact(self, first: int, end: int, cap_bytes: float) -> LayerChoice | None:
        """The cheapest layers to recompute, which the tables hold from now on; None if the stage never fits."""
        key = (cap_bytes, first, end)
        if key not in self._exact:
            self._exact[key] = cheapest_layers(self._costs, first, end, self._moments, cap_bytes=cap_bytes)
            self._enter(self._tables[cap_bytes], first, end, self._exact[key])
        return self._exact[key]

    def _enter(self, table: FloatArray, first: int, end: int, choice: LayerChoice | None) -> None:
        column = first - end + table.shape[1]
        if column >= 0:
            table[end, column] = np.inf if choice is None else choice.lower_bound_us
