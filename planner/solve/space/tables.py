"""What each device can run: for every stage of the chain the recomputation that fits, in windows of limited width.

In GPipe a stage's memory does not depend on where the other cuts are, so a memory cap only says which stages are
allowed, and with which recomputation. The cheapest recomputation that fits is always the right one for the step time:
it costs the least, and nothing else in the plan depends on it.

A table has a row per end e = 0..L and `width` columns: column c is the stage of layers e-width+c .. e-1, so that the
last column is a single layer and the window of a row slides with its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.core.cost.chain_costs import ChainCosts, sums_before
from planner.core.cost.memory import totals_of
from planner.core.cost.moments import Moments
from planner.core.cost.passing import is_simple
from planner.core.cost.stage_time import CHOICES
from planner.core.values.plan import RecomputePolicy
from planner.solve.space.arrays import ChoiceArray, FloatArray, IntArray

NOWHERE = -1
"""In place of an index into `CHOICES`: no recomputation makes the stage fit."""

_MOST_ENTRIES, _MOST_BY_LENGTH = 1 << 18, 1 << 15  # of a block of rows, to bound transient memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTable:
    """Peak bytes of every stage in the window for each allowed recomputation, the reserve not included."""

    totals: dict[int, FloatArray]
    """By index into `CHOICES`, each of shape (L+1, width); infinite where there is no such stage."""

    @classmethod
    def of(cls, costs: ChainCosts, moments: Moments, *, width: int, policy: RecomputePolicy) -> "MemoryTable":
        """The table of a chain, of stages whose devices have these moments."""
        allowed = allowed_choices(policy, moments.micro_batches)
        choices = [CHOICES[n] for n in allowed]
        by_length = is_simple(costs)

        def block(firsts: IntArray, stop: int) -> list[FloatArray]:
            columns = width if by_length else slice(int(firsts[0]), stop)
            return totals_of(costs, firsts, columns, moments, choices=choices)

        tables = windowed(costs.num_layers, width, len(allowed), block, by_length=by_length)
        return cls(totals=dict(zip(allowed, tables, strict=True)))

    @property
    def width(self) -> int:
        """Layers of the longest stage."""
        return int(next(iter(self.totals.values())).shape[1])

    def narrowed(self, width: int) -> "MemoryTable":
        """The table without stages of more than `width` layers."""
        return MemoryTable(totals={n: totals[:, self.width - width :] for n, totals in self.totals.items()})

    def smallest(self) -> FloatArray:
        """Least bytes each stage can do with, shape (L+1, width)."""
        smallest: FloatArray = np.minimum.reduce(list(self.totals.values()))
        return smallest

    def most_bytes(self) -> float:
        """What the hungriest stage needs with the fastest recomputation; infinite where that is not allowed."""
        if 0 not in self.totals:
            return np.inf
        fastest = self.totals[0]
        return float(fastest[np.isfinite(fastest)].max(initial=0.0))

    def choices(self, cap_bytes: float) -> ChoiceArray:
        """The cheapest recomputation that fits into `cap_bytes`, shape (L+1, width)."""
        table = np.full(next(iter(self.totals.values())).shape, NOWHERE, dtype=np.int8)
        for n in sorted(self.totals, reverse=True):
            table[self.totals[n] <= cap_bytes] = n
        return table


def allowed_choices(policy: RecomputePolicy, micro_batches: int) -> list[int]:
    """Indices into `CHOICES` that a policy allows."""
    allowed = [n for n, choice in enumerate(CHOICES) if policy in ("auto", "layers", choice)]
    if micro_batches == 1 and 1 in allowed:
        allowed = [n for n in (0, *allowed[1:]) if n != 1]  # the only micro-batch is the last
    return sorted(set(allowed))


def windowed(
    num_layers: int,
    width: int,
    count: int,
    block: Callable[[IntArray, int], Sequence[FloatArray]],
    *,
    by_length: bool = False,
) -> list[FloatArray]:
    """Tables of shape (L+1, width), filled block by block; infinite where there is no such stage.

    Args:
        num_layers: L.
        width: Layers of the longest stage.
        count: How many tables.
        block: For ascending first layers and a last layer's end `stop`: for each table the values of the stages that
            end in firsts[0]+1..stop, of shape (firsts, stop - firsts[0]).
        by_length: Whether the values are those of stages of 1..width layers instead, of shape (firsts, width).
    """
    tables = [np.full((num_layers + 1, width), np.inf) for _ in range(count)]
    rows = max(1, _MOST_BY_LENGTH // width if by_length else min(_MOST_ENTRIES // (width + 64), 64 + width // 2))
    for start in range(0, num_layers, rows):
        firsts = np.arange(start, min(start + rows, num_layers))
        stop = min(num_layers, int(firsts[-1]) + width)
        ends = firsts[:, None] + np.arange(1, width + 1) if by_length else np.arange(start + 1, stop + 1)[None, :]
        columns = firsts[:, None] - ends + width
        inside = (columns >= 0) & (columns < width) & (ends <= num_layers)
        place = np.broadcast_to(ends, columns.shape)[inside], columns[inside]
        for table, values in zip(tables, block(firsts, stop), strict=True):
            table[place] = values[inside]
    return tables


def windows_before(values: FloatArray, width: int) -> FloatArray:
    """For each end the values at the first layers of its window, infinite in front of the chain; shape (L+1, width)."""
    padded = np.concatenate([np.full(width, np.inf), values[:-1]])
    windows: FloatArray = np.lib.stride_tricks.sliding_window_view(padded, width)
    return windows


def width_for(costs: ChainCosts, *, longest_us: float, cap_bytes: float) -> int:
    """Layers of the longest stage that is not slower than `longest_us` and whose parameters alone fit.

    Args:
        costs: The chain.
        longest_us: Bound on a stage's forward + backward time without recomputation.
        cap_bytes: The largest cap.
    """
    ends = np.arange(1, costs.num_layers + 1)
    tied = sum(tie.parameter_bytes + tie.optimizer_bytes for tie in costs.ties)
    times = sums_before(costs.forward_us + costs.backward_us)
    fixed = sums_before(costs.state.always)
    # Sums in another order differ by rounding: the window may be a layer too wide, never too narrow.
    by_time = np.searchsorted(times, times[1:] - longest_us * (1 + 1e-9) - 1e-9)
    by_memory = np.searchsorted(fixed, fixed[1:] - cap_bytes - tied)
    return int(max(1, (ends - np.maximum(by_time, by_memory)).max()))
