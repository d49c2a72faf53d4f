"""Which layers of a stage to recompute, each on its own, so that it fits its cap at the least cost in time.

The memory of such a stage is the largest of a few moments (`planner.core.cost.memory`), each of them linear in what a
micro-batch holds in the end and in the highest level while layers run one by one (`planner.core.cost.layer_memory`):

    fixed + weight · held + level <= limit

`cheapest_layers` walks through the layers from the first to the last with labels

    time   of the layers recomputed so far
    held   by one micro-batch so far
    room   the most that one micro-batch may hold in the end, as the levels so far leave it

in groups, one for each list of storages that go into the next layer and that nobody holds yet. A label goes if another
of its group is no worse in all three, if no decisions behind it can fit, or if the time it comes to at least is not
below the best known. That time is a fractional knapsack: with what each layer behind can save at most, the bytes that
must go are saved by the layers that save most for their time. The same bound for every stage of a chain at once is
`stage_bounds.py`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import KEEP, RECOMPUTE, Pending, StageLayers
from planner.core.cost.memory import linear_moments
from planner.core.cost.moments import Moments
from planner.solve.space.arrays import BoolArray, FloatArray, IndexArray, IntArray

RELATIVE = 1e-12
"""Sums in another order differ by rounding: a time must be less by more than this to count as less."""

_FEW_LABELS = 64
"""A first walk keeps so many: it soon finds a good answer, by which the second one drops most labels."""

_MANY_LABELS = 1 << 16
"""A walk that only asks whether anything fits keeps so many: with no times to weigh, few remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """What to recompute."""

    recomputed: tuple[int, ...]
    """Layers, counted along the chain; empty if all fits as it is."""
    recompute_us: float
    """Their forward times, which every micro-batch pays in backward."""
    lower_bound_us: float
    """No choice that fits costs less."""

    @property
    def is_exact(self) -> bool:
        """Whether no choice that fits costs less than this one."""
        return self.lower_bound_us >= self.recompute_us * (1 - RELATIVE)


def cheapest_layers(
    costs: ChainCosts,
    first: int,
    end: int,
    moments: Moments,
    *,
    limit_bytes: float,
    most_labels: int = 4096,
) -> LayerChoice | None:
    """The layers of a stage to recompute so that it fits, with the least time; None if it never does.

    `stage_memory(..., recompute="layers")` of the answer is at most the cap.

    Args:
        costs: The chain at the plan's micro-batch size.
        first: First layer.
        end: One past the last layer.
        moments: Of the stage's device.
        limit_bytes: The cap, the reserve taken off.
        most_labels: So many labels are followed from each layer to the next; only if there are more, the answer may
            be inexact.

    Complexity: O((end - first) · labels); there are few where many layers are alike.
    """
    linear = linear_moments(costs, np.array([first]), end, moments)
    limits = [
        Limit(limit_bytes - float(moment.fixed[0, -1]), moment.weight, -1 if moment.level is None else moment.level)
        for moment in linear
    ]
    return cheapest_within(
        StageLayers.of(costs, first, end), limits, costs.forward_us[first:end], most_labels=most_labels
    )


class Limit(NamedTuple):
    """What a moment allows: weight · held + level <= bytes."""

    bytes: float
    weight: int
    level: int
    """Position in `LayerPeaks`; below 0 where no layer of the stage runs."""

    def room(self, level: FloatArray | float) -> FloatArray:
        """The most that may be held in the end; -inf where nothing fits."""
        # Nothing waits in such a moment (M = 1, say): what is held in the end does not matter to it.
        if self.weight == 0:
            return np.where(np.less_equal(level, self.bytes), np.inf, -np.inf)
        room: FloatArray = np.floor(np.subtract(self.bytes, level) / self.weight)
        return room


def cheapest_within(
    layers: StageLayers, limits: Sequence[Limit], times_us: FloatArray, *, most_labels: int = 4096
) -> LayerChoice | None:
    """The layers to recompute so that every limit is kept, with the least time; None if they never are.

    Args:
        layers: Of the stage.
        limits: What each moment of its device allows.
        times_us: What it takes to compute each layer again, shape (layers,).
        most_labels: As for `cheapest_layers`.
    """
    with_level = [limit for limit in limits if limit.level >= 0]
    # Where nothing of the stage runs, only what it holds in the end counts.
    room = min((float(limit.room(0.0)) for limit in limits if limit.level < 0), default=np.inf)
    if room < 0:
        return None
    walk = _LayerDynamicProgram(layers, with_level, times_us, room)
    # A narrow walk first. If labels were let go in it that may lead to less, a wide one, with less that is promising.
    best, bound_us = walk.run(np.inf, min(_FEW_LABELS, most_labels))
    if bound_us < (best.time if best else np.inf):
        better, bound_us = walk.run(best.time if best else np.inf, most_labels)
        best = better or best
    if best is None and bound_us < np.inf:
        # The labels that would have fitted were let go for faster ones. Without times, few labels remain.
        best, _ = _LayerDynamicProgram(layers, with_level, np.zeros_like(times_us), room).run(np.inf, _MANY_LABELS)
    if best is None:
        return None
    recomputed = walk.without_idle(best.recomputed)
    recompute_us = float(times_us[np.array(recomputed, dtype=np.int64) - layers.first].sum())
    return LayerChoice(recomputed=recomputed, recompute_us=recompute_us, lower_bound_us=min(bound_us, recompute_us))


class _Choice(NamedTuple):
    time: float
    recomputed: tuple[int, ...]


class _Labels(NamedTuple):
    time: FloatArray
    held: FloatArray
    room: FloatArray
    bound: FloatArray
    """Time at least, in the end."""
    parent: IntArray
    """Among all labels in front of the layer."""
    is_recomputed: BoolArray
    """Whether the layer is recomputed."""

    def take(self, chosen: IndexArray | BoolArray) -> "_Labels":
        fields: list[Any] = [field[chosen] for field in self]
        return _Labels(*fields)


def _concatenate(parts: Iterable[_Labels]) -> _Labels:
    return _Labels(*map(np.concatenate, zip(*parts, strict=True)))


PendingStorages = tuple[tuple[int, float], ...]
"""Storages that nobody holds yet: the last layer that each is handed to, and its bytes."""


class _LayerDynamicProgram:
    """The layers of one stage, with what is known of the layers behind each, whatever is decided there."""

    def __init__(self, layers: StageLayers, limits: Sequence[Limit], times: FloatArray, room: float) -> None:
        self.layers = layers
        self.limits = limits
        self.room = room
        self.times = times
        self.num_layers = len(times)
        # What goes out of the last layer is held by the engine.
        leaving = np.array(
            [[_leaving_bytes(outputs, layers.end, d) for outputs in layers.pending] for d in (KEEP, RECOMPUTE)]
        )
        kept, recomputed = layers.held + leaving
        # A recomputed layer keeps its input, if nobody else may.
        recomputed += [
            0.0,
            *(_passed_bytes(outputs, layers.first + n + 1) for n, outputs in enumerate(layers.pending[:-1])),
        ]
        # What a layer can save at most, for knapsacks: it keeps less, if it may be recomputed at all.
        savings = np.where(layers.can_recompute, np.maximum(kept - recomputed, 0.0), 0.0)
        pending = sum(each.bytes[RECOMPUTE] for outputs in layers.pending for each in outputs)
        out = float(layers.passed[-1])
        self.kept_after = out + _suffix_sums(kept)
        self.least_after = out + _suffix_sums(np.minimum(kept, recomputed))
        self.most_after = out + pending + _suffix_sums(layers.held.max(axis=0))
        # Levels behind a layer, whatever is decided there: at least `lowest`, and `highest` if all is kept that can be.
        lowest = [rows.min(axis=0) for rows in layers.peaks]
        self.highest = [self._highest_after(peaks, layers.held[KEEP]) for peaks in lowest]
        self.lowest = [self._highest_after(peaks, layers.held.min(axis=0)) for peaks in lowest]
        self.knapsacks = [_knapsack(savings[n:], times[n:]) for n in range(self.num_layers + 1)]

    def _highest_after(self, peaks: FloatArray, held_bytes: FloatArray) -> FloatArray:
        """Above what is held in front of each layer, the highest level from there on."""
        highest = np.full(self.num_layers + 1, -np.inf)
        for n in reversed(range(self.num_layers)):
            highest[n] = max(peaks[n], held_bytes[n] * self.layers.stacked + highest[n + 1])
        return highest

    def run(self, upper_us: float, width: int) -> tuple[_Choice | None, float]:
        """The best choice if it is below `upper_us`, and a bound on all choices that were let go for lack of width."""
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        groups: dict[PendingStorages, _Labels] = {(): _Labels(zero, zero, zero + self.room, zero, none, none > 0)}
        history: list[tuple[IntArray, BoolArray]] = []
        dropped_us = np.inf
        for n in range(self.num_layers):
            groups, bound = _limit_width(self._next(n, groups, upper_us), width)
            dropped_us = min(dropped_us, bound)
            if not groups:
                return None, dropped_us
            labels = _concatenate(groups.values())
            history.append((labels.parent, labels.is_recomputed))
        return self._best(groups, history), dropped_us

    def _next(self, n: int, groups: dict[PendingStorages, _Labels], upper_us: float) -> dict[PendingStorages, _Labels]:
        """All labels behind layer `n` that may still become something."""
        parts: dict[PendingStorages, list[_Labels]] = {}
        sizes = np.cumsum([0, *(len(labels.time) for labels in groups.values())])
        for (pending, labels), begin in zip(groups.items(), sizes, strict=False):
            places = begin + np.arange(len(labels.time))
            for decision in (KEEP, RECOMPUTE)[: 1 + int(self.layers.can_recompute[n])]:
                extended = self._extend(n, pending, labels._replace(parent=places), decision)
                parts.setdefault(self._pending_after(n, pending, decision), []).append(extended)
        # Only labels of one group may dominate each other: what waits in front of a layer may yet have to be held.
        kept = {key: _remove_dominated(self._prune(n + 1, _concatenate(some), upper_us)) for key, some in parts.items()}
        return {pending: labels for pending, labels in kept.items() if len(labels.time)}

    def _pending_after(self, n: int, pending: PendingStorages, decision: int) -> PendingStorages:
        after = [each for each in pending if each[0] > self.layers.first + n] if decision == KEEP else []
        outputs = [(each.until, each.bytes[decision]) for each in self.layers.pending[n] if each.bytes[decision] > 0]
        return (*after, *outputs)

    def _extend(self, n: int, pending: PendingStorages, labels: _Labels, decision: int) -> _Labels:
        """The labels of one group behind layer `n`; their own places become those of their parents."""
        layers = self.layers
        size = sum(each[1] for each in pending)
        # A recomputed layer holds its input itself, if nobody in front does: from then on it waits no more.
        taken = size * decision
        entering = (size + layers.passed[n], taken, taken)
        room = labels.room
        for limit in self.limits:
            base = (labels.held + entering[limit.level]) * layers.stacked
            room = np.minimum(room, limit.room(base + layers.peaks[limit.level][decision, n]))
        return _Labels(
            labels.time + decision * self.times[n],
            labels.held + layers.held[decision, n] + taken,
            room,
            labels.bound,
            labels.parent,
            np.full(len(labels.time), decision == RECOMPUTE),
        )

    def _prune(self, n: int, labels: _Labels, upper_us: float) -> _Labels:
        """The labels that can be completed to something that fits and is below `upper_us`."""
        held, room, stacked = labels.held, labels.room, self.layers.stacked
        at_end = held + self.kept_after[n]
        must_go = np.full_like(held, -np.inf)
        for limit in self.limits:
            # What the layers behind leave at most: labels that differ beyond that are not different.
            room = np.minimum(room, limit.room(held * stacked + self.lowest[limit.level][n]))
            # A byte that goes is one less in each micro-batch that waits, and, where layers stack up, in the level too.
            if limit.weight + stacked > 0:
                level = held * stacked + self.highest[limit.level][n]
                over = (limit.weight * at_end + level - limit.bytes) / (limit.weight + stacked)
                must_go = np.maximum(must_go, over)
        must_go = np.maximum(must_go, at_end - room)
        # To make so many bytes go takes the layers behind that much time at least.
        saved, recompute_us = self.knapsacks[n]
        bound = labels.time + np.interp(must_go, saved, recompute_us, right=np.inf)
        fits = (held + self.least_after[n] <= room) & (bound < upper_us * (1 - RELATIVE))
        # Room that can never be filled is as good as any: so labels become equal, and dominate each other.
        room = np.where(room >= held + self.most_after[n], np.inf, room)
        return labels._replace(room=room, bound=bound).take(fits)

    def _best(
        self, groups: dict[PendingStorages, _Labels], history: Sequence[tuple[IntArray, BoolArray]]
    ) -> _Choice | None:
        held = np.concatenate([g.held + sum(each[1] for each in pending) for pending, g in groups.items()])
        labels = _concatenate(groups.values())
        fitting = np.flatnonzero(held + self.layers.passed[-1] <= labels.room)
        if not len(fitting):
            return None
        # Of equal times the one that holds least; what nobody held by the last layer is held by the engine.
        index = int(fitting[np.lexsort((held[fitting], labels.time[fitting]))[0]])
        best_us, recomputed = float(labels.time[index]), []
        for n in reversed(range(self.num_layers)):
            parent, recompute = history[n]
            if recompute[index]:
                recomputed.append(self.layers.first + n)
            index = int(parent[index])
        return _Choice(best_us, tuple(reversed(recomputed)))

    def without_idle(self, recomputed: tuple[int, ...]) -> tuple[int, ...]:
        """The same without layers that cost no time and whose recomputation is not needed."""
        chosen = set(recomputed)
        for layer in recomputed:
            if self.times[layer - self.layers.first] == 0 and self._fits(chosen - {layer}):
                chosen.remove(layer)
        return tuple(sorted(chosen))

    def _fits(self, recomputed: Collection[int]) -> bool:
        saved, *levels = self.layers.levels(recomputed)
        fits = (limit.weight * saved + levels[limit.level] <= limit.bytes for limit in self.limits)
        return saved <= self.room and all(fits)


def _leaving_bytes(outputs: Sequence[Pending], end: int, decision: int) -> float:
    return sum(each.bytes[decision] for each in outputs if each.until >= end)


def _passed_bytes(outputs: Sequence[Pending], layer: int) -> float:
    """What goes into `layer`, and no further, and is not held even if its maker holds what it can."""
    return sum(each.bytes[KEEP] for each in outputs if each.until == layer)


def _suffix_sums(per_layer: FloatArray) -> FloatArray:
    """Sums from each layer to the last."""
    sums: FloatArray = np.append(np.cumsum(per_layer[::-1])[::-1], 0.0)
    return sums


def _knapsack(savings: FloatArray, times: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Bytes saved, and the least time for that, where parts of layers may be recomputed: the corners of the curve."""
    # The greedy order, most bytes for the time first, is optimal where the last one may be taken in part.
    useful = np.flatnonzero(savings > 0)
    order = useful[np.argsort(times[useful] / savings[useful], kind="stable")]
    return np.append(0.0, np.cumsum(savings[order])), np.append(0.0, np.cumsum(times[order]))


def _remove_dominated(labels: _Labels) -> _Labels:
    """The labels of a group without those that another is no worse than in all respects."""
    order = np.lexsort((-labels.room, labels.held, labels.time))
    held, room = labels.held[order], labels.room[order]
    # In order of time, a label is dominated by one before it that holds no more and has no less room.
    if len(order) and (room == room[0]).all():
        before = np.append(np.inf, np.minimum.accumulate(held)[:-1])
        return labels.take(order[held < before])
    return labels.take(order[_staircase(held.tolist(), room.tolist())])


def _staircase(held_bytes: Sequence[float], room: Sequence[float]) -> list[int]:
    """The places at which less is held, or more may be, than at each place before."""
    kept = []
    steps: list[float] = []  # what is held on each step, ascending
    rooms: list[float] = []  # and what may be: on a higher step more, or the step would be of no use
    for place, (low, high) in enumerate(zip(held_bytes, room, strict=True)):
        # The highest step that is not above `low` has the most room of all that hold as little.
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


def _limit_width(groups: dict[PendingStorages, _Labels], width: int) -> tuple[dict[PendingStorages, _Labels], float]:
    """At most `width` labels, half by their bounds and half spread over what is held; and the others' least bound."""
    sizes = [len(labels.time) for labels in groups.values()]
    if sum(sizes) <= width:
        return groups, np.inf
    bound = np.concatenate([labels.bound for labels in groups.values()])
    held = np.concatenate([labels.held for labels in groups.values()])
    # Only the fastest would often hold too much in the end: half of the places are for labels that hold less.
    fast, slow = np.split(np.lexsort((held, bound)), [width - width // 2])
    by_held = slow[np.argsort(held[slow], kind="stable")]
    chosen = np.zeros(len(bound), dtype=np.bool_)
    chosen[fast] = True
    chosen[by_held[np.linspace(0, len(by_held) - 1, width // 2).astype(np.int64)]] = True
    places = np.split(chosen, np.cumsum(sizes)[:-1])
    narrowed = {
        key: labels.take(some) for (key, labels), some in zip(groups.items(), places, strict=True) if some.any()
    }
    return narrowed, float(bound[~chosen].min())
