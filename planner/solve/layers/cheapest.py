"""Choice of the layers of a stage to recompute, so that the stage fits its memory limit in the least time.

The memory of the stage is checked at a few points in the step (`planner.core.cost.memory`). At each point the limit is
a linear inequality (`StageLayerMemory`):

    fixed + weight · saved + peak <= limit

    fixed    bytes that do not depend on the choice
    weight   number of micro-batches whose saved bytes are in memory
    saved    bytes that a micro-batch saves in the stage for its backward
    peak     highest temporary memory while a layer runs

A dynamic program visits the layers in order. A candidate chooses among the layers visited so far. Its values are

    time     time to recompute the chosen layers
    held     bytes of `saved` that are saved in the visited layers
    room     upper limit on `saved`, given the peaks of the visited layers

An output of a visited layer is pending if no layer has saved it yet, but a later layer may save it as its input. The
search compares only candidates with the same pending outputs. It drops a candidate if

- another candidate is at least as good in all three values,
- no choice for the later layers can fit, or
- a lower bound of its total time is not below the best known time.

The lower bound is a fractional knapsack: recompute the later layers that free most bytes per time, until enough bytes
are free. `stage_times.py` computes the same lower bound for every stage of a chain at once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IndexArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import KEEP, RECOMPUTE, StageLayerMemory
from planner.core.cost.memory import stage_memory_functions
from planner.core.cost.peak_points import PeakPoints

RELATIVE = 1e-12
"""Relative difference above which a time counts as shorter. Rounding errors are smaller."""

_FEW_CANDIDATES = 64
"""Number of candidates kept in the first run of the dynamic program, which gives the time to beat in the second run."""

_MANY_CANDIDATES = 1 << 16
"""Number of candidates kept in a run that ignores recomputation times, to find any choice that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Layers of a stage to recompute, and the time that this takes."""

    recomputed: tuple[int, ...]
    """Indices of the recomputed layers in the chain; empty if the stage fits without recomputation."""
    recompute_us: float
    """Time to recompute these layers, in microseconds per micro-batch."""
    lower_bound_us: float
    """Lower bound of `recompute_us` over all choices that fit."""

    @property
    def is_optimal(self) -> bool:
        """Return True if no choice that fits takes less time."""
        return self.lower_bound_us >= self.recompute_us * (1 - RELATIVE)


def cheapest_recomputed_layers(
    costs: ChainCosts,
    first: int,
    end: int,
    points: PeakPoints,
    *,
    limit_bytes: float,
    most_choices: int = 4096,
) -> LayerChoice | None:
    """Return the layers whose recomputation makes a stage fit and takes the least time; None if no choice fits.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        first: First layer of the stage.
        end: One past the last layer of the stage.
        points: Points in the step at which the memory of the device may peak.
        limit_bytes: Memory limit of the device minus its reserve, in bytes.
        most_choices: Number of candidates to keep after each layer. The result is exact if this number suffices.

    Complexity: O(n P) for n layers and at most P candidates after each layer. P is small if many layers are equal.
    """
    linear = stage_memory_functions(costs, np.array([first]), end, points)
    limits = [
        MemoryLimit(limit_bytes - float(m.fixed[0, -1]), m.weight, -1 if m.peak is None else m.peak) for m in linear
    ]
    return cheapest_layers_within(
        StageLayerMemory.of(costs, first, end), limits, costs.forward_us[first:end], most_choices=most_choices
    )


class MemoryLimit(NamedTuple):
    """Limit on the memory of a stage at one point in the step: weight * saved bytes + peak bytes <= bytes.

    The saved bytes are those of one micro-batch. `weight` is the number of micro-batches with saved bytes. The peak
    bytes are the memory of the running layer.
    """

    bytes: float
    """Memory limit minus all memory that does not depend on the recomputed layers."""
    weight: int
    """Number of micro-batches whose saved bytes are in memory at this point."""
    peak: int
    """Index of the field of `LayerPeaks` for the running pass; -1 if no layer of the stage runs."""

    def max_saved_bytes(self, peak: FloatArray | float) -> FloatArray:
        """Return the most bytes that one micro-batch may save, if the running layer needs `peak` bytes."""
        # With weight 0, for example if M = 1, no complete micro-batch is in flight: only the peak counts.
        if self.weight == 0:
            return np.where(np.less_equal(peak, self.bytes), np.inf, -np.inf)
        most_bytes: FloatArray = np.floor(np.subtract(self.bytes, peak) / self.weight)
        return most_bytes


def cheapest_layers_within(
    layers: StageLayerMemory, limits: Sequence[MemoryLimit], times_us: FloatArray, *, most_choices: int = 4096
) -> LayerChoice | None:
    """Return the recomputation of least time that keeps all memory limits of a stage; None if there is none.

    Args:
        layers: Memory of the stage's layers.
        limits: Memory limits of the stage, one for each point in the step.
        times_us: Time to recompute each layer.
        most_choices: Number of candidates to keep after each layer. The result is exact if this number suffices.
    """
    with_level = [limit for limit in limits if limit.peak >= 0]
    # If no layer of the stage runs, only the saved bytes count.
    room = min((float(limit.max_saved_bytes(0.0)) for limit in limits if limit.peak < 0), default=np.inf)
    if room < 0:
        return None
    walk = _LayerDynamicProgram(layers, with_level, times_us, room)
    # Run with few candidates first. If a dropped one may be faster, run with more candidates and a better time to beat.
    best, bound_us = walk.run(np.inf, min(_FEW_CANDIDATES, most_choices))
    if bound_us < (best.time if best else np.inf):
        better, bound_us = walk.run(best.time if best else np.inf, most_choices)
        best = better or best
    if best is None and bound_us < np.inf:
        # Candidates that fit were dropped in favor of faster ones. If all times are 0, few candidates remain.
        best, _ = _LayerDynamicProgram(layers, with_level, np.zeros_like(times_us), room).run(np.inf, _MANY_CANDIDATES)
    if best is None:
        return None
    recomputed = walk.without_idle(best.recomputed)
    recompute_us = float(times_us[np.array(recomputed, dtype=np.int64) - layers.first].sum())
    return LayerChoice(recomputed=recomputed, recompute_us=recompute_us, lower_bound_us=min(bound_us, recompute_us))


class _Choice(NamedTuple):
    time: float
    recomputed: tuple[int, ...]


class _Candidates(NamedTuple):
    # Candidates, one array entry each. The module's docstring explains time, held and room.
    time: FloatArray
    held: FloatArray
    room: FloatArray
    bound: FloatArray  # lower bound of the recomputation time of the whole stage
    parent: IntArray  # index of the candidate from which this one was made at the last layer
    is_recomputed: BoolArray  # True if the last visited layer is recomputed

    def take(self, chosen: IndexArray | BoolArray) -> "_Candidates":
        fields: list[Any] = [field[chosen] for field in self]
        return _Candidates(*fields)


def _concatenate(parts: Iterable[_Candidates]) -> _Candidates:
    return _Candidates(*map(np.concatenate, zip(*parts, strict=True)))


PendingOutputs = tuple[tuple[int, float], ...]
"""For each pending output, the last layer that reads it, and its bytes."""


class _LayerDynamicProgram:
    # For each n, these arrays have bounds for the layers from n to the last one:
    #
    #     kept_after               bytes that these layers save without recomputation
    #     least_after, most_after  fewest and most bytes that they save with any choice
    #     lowest, highest          lowest peak of any choice, and peak without recomputation, by field of `LayerPeaks`

    def __init__(self, layers: StageLayerMemory, limits: Sequence[MemoryLimit], times: FloatArray, room: float) -> None:
        self.layers = layers
        self.limits = limits
        self.room = room
        self.times = times
        self.num_layers = len(times)
        # The engine holds the output of the last layer.
        leaving = [
            [sum(each.bytes[d] for each in outputs if each.until >= layers.end) for outputs in layers.pending]
            for d in (KEEP, RECOMPUTE)
        ]
        kept, recomputed = layers.held + np.array(leaving)
        # A recomputed layer saves its input, unless another layer saves it.
        for n, outputs in enumerate(layers.pending[:-1], start=1):
            recomputed[n] += sum(each.bytes[KEEP] for each in outputs if each.until == layers.first + n)
        # Most bytes that recomputing each layer can free, for the knapsacks.
        savings = np.where(layers.can_recompute, np.maximum(kept - recomputed, 0.0), 0.0)
        pending = sum(each.bytes[RECOMPUTE] for outputs in layers.pending for each in outputs)
        out = float(layers.passed[-1])
        self.kept_after = out + _suffix_sums(kept)
        self.least_after = out + _suffix_sums(np.minimum(kept, recomputed))
        self.most_after = out + pending + _suffix_sums(layers.held.max(axis=0))
        lowest = [rows.min(axis=0) for rows in layers.peaks]
        self.highest = [self._highest_after(peaks, layers.held[KEEP]) for peaks in lowest]
        self.lowest = [self._highest_after(peaks, layers.held.min(axis=0)) for peaks in lowest]
        self.knapsacks = [_knapsack(savings[n:], times[n:]) for n in range(self.num_layers + 1)]

    def _highest_after(self, peaks: FloatArray, held_bytes: FloatArray) -> FloatArray:
        highest = np.full(self.num_layers + 1, -np.inf)
        for n in reversed(range(self.num_layers)):
            highest[n] = max(peaks[n], held_bytes[n] * self.layers.stacked + highest[n + 1])
        return highest

    def run(self, upper_us: float, width: int) -> tuple[_Choice | None, float]:
        # Return the fastest choice below `upper_us`, and a lower bound of the recomputation times of dropped choices.
        # At most `width` partial choices are kept after each layer.
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        groups: dict[PendingOutputs, _Candidates] = {
            (): _Candidates(zero, zero, zero + self.room, zero, none, none > 0)
        }
        history: list[tuple[IntArray, BoolArray]] = []
        dropped_us = np.inf
        for n in range(self.num_layers):
            groups, bound = _limit_width(self._next(n, groups, upper_us), width)
            dropped_us = min(dropped_us, bound)
            if not groups:
                return None, dropped_us
            candidates = _concatenate(groups.values())
            history.append((candidates.parent, candidates.is_recomputed))
        return self._best(groups, history), dropped_us

    def _next(
        self, n: int, groups: dict[PendingOutputs, _Candidates], upper_us: float
    ) -> dict[PendingOutputs, _Candidates]:
        parts: dict[PendingOutputs, list[_Candidates]] = {}
        sizes = np.cumsum([0, *(len(candidates.time) for candidates in groups.values())])
        for (pending, candidates), begin in zip(groups.items(), sizes, strict=False):
            places = begin + np.arange(len(candidates.time))
            for decision in (KEEP, RECOMPUTE)[: 1 + int(self.layers.can_recompute[n])]:
                extended = self._extend(n, pending, candidates._replace(parent=places), decision)
                parts.setdefault(self._pending_after(n, pending, decision), []).append(extended)
        # Only candidates of one group are compared, because a later layer may have to save the pending outputs.
        kept = {key: _remove_dominated(self._prune(n + 1, _concatenate(some), upper_us)) for key, some in parts.items()}
        return {pending: candidates for pending, candidates in kept.items() if len(candidates.time)}

    def _pending_after(self, n: int, pending: PendingOutputs, decision: int) -> PendingOutputs:
        after = [each for each in pending if each[0] > self.layers.first + n] if decision == KEEP else []
        outputs = [(each.until, each.bytes[decision]) for each in self.layers.pending[n] if each.bytes[decision] > 0]
        return (*after, *outputs)

    def _extend(self, n: int, pending: PendingOutputs, candidates: _Candidates, decision: int) -> _Candidates:
        layers = self.layers
        size = sum(each[1] for each in pending)
        # A recomputed layer saves its input, unless an earlier layer has saved it; the input is then not pending.
        taken = size * decision
        entering = (size + layers.passed[n], taken, taken)
        room = candidates.room
        for limit in self.limits:
            base = (candidates.held + entering[limit.peak]) * layers.stacked
            room = np.minimum(room, limit.max_saved_bytes(base + layers.peaks[limit.peak][decision, n]))
        return _Candidates(
            candidates.time + decision * self.times[n],
            candidates.held + layers.held[decision, n] + taken,
            room,
            candidates.bound,
            candidates.parent,
            np.full(len(candidates.time), decision == RECOMPUTE),
        )

    def _prune(self, n: int, candidates: _Candidates, upper_us: float) -> _Candidates:
        held, room, stacked = candidates.held, candidates.room, self.layers.stacked
        at_end = held + self.kept_after[n]
        must_go = np.full_like(held, -np.inf)
        for limit in self.limits:
            # Later peaks limit the room as well. Candidates that differ only above that limit become equal.
            room = np.minimum(room, limit.max_saved_bytes(held * stacked + self.lowest[limit.peak][n]))
            # Saving one byte less removes a byte per micro-batch in flight and, if peaks are stacked, one of the peak.
            if limit.weight + stacked > 0:
                peak = held * stacked + self.highest[limit.peak][n]
                over = (limit.weight * at_end + peak - limit.bytes) / (limit.weight + stacked)
                must_go = np.maximum(must_go, over)
        must_go = np.maximum(must_go, at_end - room)
        # The knapsack has the least time in which later layers can save that many bytes less.
        saved, recompute_us = self.knapsacks[n]
        bound = candidates.time + np.interp(must_go, saved, recompute_us, right=np.inf)
        fits = (held + self.least_after[n] <= room) & (bound < upper_us * (1 - RELATIVE))
        # Room that can never be filled counts as infinite, so that more candidates are equal and can be dropped.
        room = np.where(room >= held + self.most_after[n], np.inf, room)
        return candidates._replace(room=room, bound=bound).take(fits)

    def _best(
        self, groups: dict[PendingOutputs, _Candidates], history: Sequence[tuple[IntArray, BoolArray]]
    ) -> _Choice | None:
        held = np.concatenate([g.held + sum(each[1] for each in pending) for pending, g in groups.items()])
        candidates = _concatenate(groups.values())
        fitting = np.flatnonzero(held + self.layers.passed[-1] <= candidates.room)
        if not len(fitting):
            return None
        # Of equally fast candidates, choose the one with the fewest bytes, including outputs that are still pending.
        index = int(fitting[np.lexsort((held[fitting], candidates.time[fitting]))[0]])
        best_us, recomputed = float(candidates.time[index]), []
        for n in reversed(range(self.num_layers)):
            parent, recompute = history[n]
            if recompute[index]:
                recomputed.append(self.layers.first + n)
            index = int(parent[index])
        return _Choice(best_us, tuple(reversed(recomputed)))

    def without_idle(self, recomputed: tuple[int, ...]) -> tuple[int, ...]:
        chosen = set(recomputed)
        for layer in recomputed:
            if self.times[layer - self.layers.first] == 0 and self._fits(chosen - {layer}):
                chosen.remove(layer)
        return tuple(sorted(chosen))

    def _fits(self, recomputed: Collection[int]) -> bool:
        saved, *levels = self.layers.saved_and_peaks(recomputed)
        fits = (limit.weight * saved + levels[limit.peak] <= limit.bytes for limit in self.limits)
        return saved <= self.room and all(fits)


def _suffix_sums(per_layer: FloatArray) -> FloatArray:
    sums: FloatArray = np.append(np.cumsum(per_layer[::-1])[::-1], 0.0)
    return sums


def _knapsack(savings: FloatArray, times: FloatArray) -> tuple[FloatArray, FloatArray]:
    # Return amounts of freed bytes, ascending, and the least recomputation time that frees each amount. Layers may be
    # recomputed in part (fractional knapsack), so the least time is linear between two entries.
    # Taking the layers with most bytes per time first is optimal, because part of the last layer may be taken.
    useful = np.flatnonzero(savings > 0)
    order = useful[np.argsort(times[useful] / savings[useful], kind="stable")]
    return np.append(0.0, np.cumsum(savings[order])), np.append(0.0, np.cumsum(times[order]))


def _remove_dominated(candidates: _Candidates) -> _Candidates:
    order = np.lexsort((-candidates.room, candidates.held, candidates.time))
    held, room = candidates.held[order], candidates.room[order]
    # Candidates are sorted by time. An earlier one dominates a later one if it has saved no more and has no less room.
    if len(order) and (room == room[0]).all():
        before = np.append(np.inf, np.minimum.accumulate(held)[:-1])
        return candidates.take(order[held < before])
    return candidates.take(order[_staircase(held.tolist(), room.tolist())])


def _staircase(held_bytes: Sequence[float], room: Sequence[float]) -> list[int]:
    # Return the indices of undominated choices. Choices are sorted by recomputation time. A choice is dominated if an
    # earlier one has at most as many saved bytes, and at least as much room for saved bytes.
    kept = []
    # Undominated pairs of saved bytes and room. Both ascend, because a pair with more bytes needs more room.
    steps: list[float] = []
    rooms: list[float] = []
    for place, (low, high) in enumerate(zip(held_bytes, room, strict=True)):
        # Of all pairs with at most `low` saved bytes, the last one has the most room.
        step = bisect_right(steps, low) - 1
        if step >= 0 and rooms[step] >= high:
            continue
        kept.append(place)
        begin = bisect_left(steps, low)
        stop = begin
        while stop < len(steps) and rooms[stop] <= high:
            stop += 1
        steps[begin:stop], rooms[begin:stop] = [low], [high]
    return kept


def _limit_width(
    groups: dict[PendingOutputs, _Candidates], width: int
) -> tuple[dict[PendingOutputs, _Candidates], float]:
    # Keep the best `width` candidates of all groups. Also return the smallest lower bound of the dropped candidates.
    sizes = [len(candidates.time) for candidates in groups.values()]
    if sum(sizes) <= width:
        return groups, np.inf
    bound = np.concatenate([candidates.bound for candidates in groups.values()])
    held = np.concatenate([candidates.held for candidates in groups.values()])
    # The fastest candidates often do not fit after the last layer, so half of them are spread over saved bytes.
    fast, slow = np.split(np.lexsort((held, bound)), [width - width // 2])
    by_held = slow[np.argsort(held[slow], kind="stable")]
    chosen = np.zeros(len(bound), dtype=np.bool_)
    chosen[fast] = True
    chosen[by_held[np.linspace(0, len(by_held) - 1, width // 2).astype(np.int64)]] = True
    places = np.split(chosen, np.cumsum(sizes)[:-1])
    narrowed = {
        key: candidates.take(some) for (key, candidates), some in zip(groups.items(), places, strict=True) if some.any()
    }
    return narrowed, float(bound[~chosen].min())
