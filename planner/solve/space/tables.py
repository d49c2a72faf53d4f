"""Tables of the stages that each device can run, with the fastest recomputation that fits.

A stage's memory does not depend on the cuts of other stages, so the fastest recomputation that fits is always the best.

A table has a row for each possible end of a stage (one past its last layer), and `most_layers` columns. The last
column has the stages of one layer, column 0 the stages of `most_layers` layers. Longer stages are not in the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.core.cost.arrays import ChoiceArray, FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts, prefix_sums
from planner.core.cost.memory import peak_bytes_of_stages
from planner.core.cost.passing import has_no_skips_or_ties
from planner.core.cost.peak_points import PeakPoints
from planner.core.cost.stage_time import CHOICES
from planner.core.values.plan import RecomputePolicy

NO_CHOICE = -1
"""Value in place of an index into `CHOICES`: no recomputation makes the stage fit."""

_MOST_ENTRIES, _MOST_BY_LENGTH = 1 << 18, 1 << 15  # of a block of rows, to bound transient memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTable:
    """Peak memory of every stage for each allowed recompute choice, in bytes, without the reserve of the device."""

    totals: dict[int, FloatArray]
    """Peak memory in bytes, by index into `CHOICES`: tables of shape (layers + 1, most_layers).

    The longest stage has `most_layers` layers. Entry [end, most_layers - n] is for the stage of the
    n layers before layer `end`."""

    @classmethod
    def of(cls, costs: ChainCosts, points: PeakPoints, *, most_layers: int, policy: RecomputePolicy) -> "MemoryTable":
        """Return the peak memory of all stages of at most `most_layers` layers.

        Args:
            costs: Costs of the layers.
            points: Points in the step at which the memory of the device may peak.
            most_layers: Number of layers of the longest stage.
            policy: Recomputation policy, which decides the allowed choices.
        """
        allowed = allowed_choices(policy, points.micro_batches)
        choices = [CHOICES[n] for n in allowed]
        by_length = has_no_skips_or_ties(costs)

        def block(firsts: IntArray, stop: int) -> list[FloatArray]:
            columns = most_layers if by_length else slice(int(firsts[0]), stop)
            return peak_bytes_of_stages(costs, firsts, columns, points, choices=choices)

        totals = {n: np.full((costs.num_layers + 1, most_layers), np.inf) for n in allowed}
        fill_stage_tables(list(totals.values()), block, by_length=by_length)
        return cls(totals=totals)

    @property
    def most_layers(self) -> int:
        """Number of layers of the longest stage in the table."""
        return int(next(iter(self.totals.values())).shape[1])

    def narrowed(self, most_layers: int) -> "MemoryTable":
        """Return the table without stages of more than `most_layers` layers."""
        return MemoryTable(totals={n: totals[:, self.most_layers - most_layers :] for n, totals in self.totals.items()})

    def smallest(self) -> FloatArray:
        """Return the smallest peak memory of each stage over all recompute choices, in bytes."""
        smallest: FloatArray = np.minimum.reduce(list(self.totals.values()))
        return smallest

    def most_bytes_without_recompute(self) -> float:
        """Return the largest peak of stages without recomputation, in bytes; infinite if the policy forbids them."""
        if 0 not in self.totals:
            return np.inf
        fastest = self.totals[0]
        return float(fastest[np.isfinite(fastest)].max(initial=0.0))

    def choices(self, limit_bytes: float) -> ChoiceArray:
        """Return a table of the fastest recompute choices that fit into `limit_bytes`; `NO_CHOICE` if none fits."""
        table = np.full(next(iter(self.totals.values())).shape, NO_CHOICE, dtype=np.int8)
        for n in sorted(self.totals, reverse=True):
            table[self.totals[n] <= limit_bytes] = n
        return table


def allowed_choices(policy: RecomputePolicy, micro_batches: int) -> list[int]:
    """Return the recompute choices that a policy allows, as ascending indices into `CHOICES`."""
    allowed = [n for n, choice in enumerate(CHOICES) if policy in ("auto", "layers", choice)]
    if micro_batches == 1 and 1 in allowed:
        # The only micro-batch is the last one, so "except-last" recomputes nothing: it is the same as "never".
        allowed = [n for n in (0, *allowed[1:]) if n != 1]
    return sorted(set(allowed))


def fill_stage_tables(
    tables: Sequence[FloatArray],
    compute_block: Callable[[IntArray, int], Sequence[FloatArray]],
    *,
    by_length: bool = False,
) -> None:
    """Fill tables that have one entry for each possible stage, with values that `compute_block` returns.

    Entry [end, most_layers - n] is for the stage of the n layers before layer `end`.

    Args:
        tables: Tables to fill, shape (layers + 1, most_layers). Entries with n > end keep their value.
        compute_block: Function of (firsts, stop) that returns an array for each table: one row for each first layer,
            and one column for each end from `firsts[0] + 1` to `stop`.
        by_length: True if `compute_block` returns one column for each stage length from 1 to `most_layers`, not for
            each end.
    """
    num_layers, most_layers = tables[0].shape[0] - 1, tables[0].shape[1]
    rows = max(
        1,
        _MOST_BY_LENGTH // most_layers
        if by_length
        else min(_MOST_ENTRIES // (most_layers + 64), 64 + most_layers // 2),
    )
    for start in range(0, num_layers, rows):
        firsts = np.arange(start, min(start + rows, num_layers))
        stop = min(num_layers, int(firsts[-1]) + most_layers)
        ends = firsts[:, None] + np.arange(1, most_layers + 1) if by_length else np.arange(start + 1, stop + 1)[None, :]
        columns = firsts[:, None] - ends + most_layers
        inside = (columns >= 0) & (columns < most_layers) & (ends <= num_layers)
        place = np.broadcast_to(ends, columns.shape)[inside], columns[inside]
        for table, values in zip(tables, compute_block(firsts, stop), strict=True):
            table[place] = values[inside]


def values_at_first_layer(values: FloatArray, most_layers: int) -> FloatArray:
    """Return a table whose entry [end, most_layers - n] is `values[end - n]`; infinite if n > end.

    The shape is (layers + 1, most_layers). `values` has the shape (layers + 1,).
    """
    padded = np.concatenate([np.full(most_layers, np.inf), values[:-1]])
    windows: FloatArray = np.lib.stride_tricks.sliding_window_view(padded, most_layers)
    return windows


def max_stage_layers(costs: ChainCosts, *, longest_us: float, limit_bytes: float) -> int:
    """Return the number of layers of the longest stage that is fast enough and whose parameters fit; at least 1.

    Args:
        costs: Costs of the layers.
        longest_us: Upper limit on a stage's forward plus backward time without recomputation, in microseconds.
        limit_bytes: The largest memory limit of a device, in bytes.
    """
    ends = np.arange(1, costs.num_layers + 1)
    tied = sum(tie.parameter_bytes + tie.optimizer_bytes for tie in costs.ties)
    times = prefix_sums(costs.forward_us + costs.backward_us)
    fixed = prefix_sums(costs.state.always)
    # Rounding depends on the order of sums: the result may be a layer too large, never too small.
    by_time = np.searchsorted(times, times[1:] - longest_us * (1 + 1e-9) - 1e-9)
    by_memory = np.searchsorted(fixed, fixed[1:] - limit_bytes - tied)
    return int(max(1, (ends - np.maximum(by_time, by_memory)).max()))
