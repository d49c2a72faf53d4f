"""Search for the stages or layers that one device recomputes. Its stages (chunks) share its memory.

If all chunks are short, `subsets.py` lists the useful subsets of layers of each chunk. If there are few combinations of
these subsets, all are compared. For other devices, `cheapest.py` chooses the layers of one chunk after the other. The
memory limit of a chunk is then the limit of the device minus the memory of the other chunks.

The choice by `cheapest.py` has two starts: whole stages, as `--recompute auto` chooses them; and layers, added in the
order of bytes freed per time until the device fits.

Complexity: O(V) runs of `cheapest.py` for a device with V chunks. Results are cached by device and cuts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.device_memory import ChunkMemoryFunction, SharedBytes, chunk_memory_function, shared_bytes
from planner.core.cost.layer_memory import StageLayerMemory, most_bytes_freed
from planner.core.cost.stage_time import LAYERS
from planner.solve.layers.cheapest import MemoryLimit, cheapest_layers_within
from planner.solve.layers.subsets import MOST_LAYERS, LayerSubsets
from planner.solve.space.partitions import Evaluator

_MOST_JOINTLY = 20_000
"""Largest number of combinations of recomputed layers of a device that are compared."""

_NEARLY_CHEAPEST = 1.25
"""Largest ratio of a recomputation time to the shortest one. A longer time may be better if a stage waits anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Recomputation of the stages of one device. Times are in microseconds on the profiled device."""

    choices: tuple[int, ...]
    """Recompute choice of each chunk: an index into `CHOICES`, or the constant `LAYERS`."""
    recomputed: tuple[tuple[int, ...], ...]
    """Indices of the layers that each chunk recomputes; empty if its choice is not `LAYERS`."""
    layers_us: tuple[float, ...]
    """Forward time of the layers in `recomputed`, for each chunk."""
    recompute_us: float
    """Recomputation time of the device in a step."""
    excess_bytes: float
    """Bytes by which the device exceeds its memory limit; 0 if it fits."""


class _ChunkRecomputation(NamedTuple):
    # The fields are as in `Recomputation`, but for one chunk.
    choice: int
    recomputed: tuple[int, ...]
    layers_us: float
    recompute_us: float
    bytes: FloatArray  # memory of the chunk at each point in the step of the device, shape (points,)


class RecomputeSearch:
    """Search for the best recomputation of each device. Results are cached."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._answers: dict[tuple[int, ...], tuple[Recomputation, ...]] = {}
        self._stages: dict[tuple[int, int], _StageTables] = {}
        self.num_solved = 0
        """Number of searches for recomputed layers so far: of one stage, or of all stages of a device together."""

    def recomputations(self, device: int, cuts: IntArray) -> tuple[Recomputation, ...]:
        """Return good recomputations of a device, best first; if none fits, those that exceed the limit least."""
        key = device, *(int(cuts[s + more]) for s in self._evaluator.stages_by_device[device] for more in (0, 1))
        if key not in self._answers:
            self._answers[key] = self._solve(device, cuts)
        return self._answers[key]

    def improve_from(self, device: int, cuts: IntArray, choices: Sequence[int]) -> Recomputation:
        """Improve the recomputation of one device; return the result.

        Args:
            device: Index of the device.
            cuts: Cuts of all stages, shape (stages + 1,).
            choices: Recompute choice of each of the device's stages to start from, as an index into `CHOICES`.
        """
        chunks, limit = self._chunks(device, cuts), self._evaluator.case.limits_bytes[device]
        start = [chunk.whole[choice] for chunk, choice in zip(chunks, choices, strict=True)]
        return _recomputation(self._improve(chunks, start, limit, range(len(chunks))), limit)

    def _solve(self, device: int, cuts: IntArray) -> tuple[Recomputation, ...]:
        chunks, limit = self._chunks(device, cuts), self._evaluator.case.limits_bytes[device]
        fastest = [chunk.whole[self._evaluator.allowed[0]] for chunk in chunks]
        if _excess_bytes(fastest, limit) <= 0:
            return (_recomputation(fastest, limit),)
        self.num_solved += 1
        together = _solve_jointly(chunks, limit)
        if together:
            return tuple(_recomputation(options, limit) for options in together)
        orders = [range(len(chunks)), range(len(chunks) - 1, -1, -1)][: len(chunks)]
        recomputations = [
            _recomputation(self._improve(chunks, start, limit, order), limit)
            for start in (_start_by_stage(chunks, limit), _start_by_layer(chunks, limit))
            for order in orders
        ]
        ordered = sorted(dict.fromkeys(recomputations), key=attrgetter("excess_bytes", "recompute_us"))
        return tuple(each for each in ordered if each.excess_bytes == ordered[0].excess_bytes)

    def _improve(
        self, chunks: "list[_Chunk]", start: list[_ChunkRecomputation], limit: float, order: Iterable[int]
    ) -> list[_ChunkRecomputation]:
        options = list(start)
        for at in order:
            taken = np.zeros_like(options[at].bytes)
            for option in (*options[:at], *options[at + 1 :]):
                taken = taken + option.bytes
            better = chunks[at].cheapest(limit - taken)
            self.num_solved += 1
            if better is not None and (
                better.recompute_us < options[at].recompute_us or _excess_bytes(options, limit) > 0
            ):
                options[at] = better
        return options

    def _chunks(self, device: int, cuts: IntArray) -> "list[_Chunk]":
        evaluator, costs = self._evaluator, self._evaluator.case.costs
        stages = evaluator.stages_by_device[device]
        shared = shared_bytes(costs, cuts[None], evaluator.num_devices, evaluator.case.schedule.placement)
        whole = {n: evaluator.stage_bytes(cuts[None], np.full((1, evaluator.num_stages), n)) for n in evaluator.allowed}
        chunks = []
        for place, s in enumerate(stages):
            counts = evaluator.peak_allocation_counts[device][:, place]
            shared_here = SharedBytes(*(item[:, s : s + 1] for item in shared))
            stage = self._stage(int(cuts[s]), int(cuts[s + 1]))
            chunk = _Chunk(stage, stage.by_layers.without(shared_here, exact=costs.exact), counts)
            for n, (always, sizes, inside) in whole.items():
                # Stages that are too long for the tables can only be recomputed layer by layer.
                held_bytes = always[0, s] + counts @ sizes[0, s] if inside[0, s] else np.full(len(counts), inf)
                chunk.whole[n] = _ChunkRecomputation(n, (), 0.0, stage.whole_us[n], held_bytes)
            chunks.append(chunk)
        return chunks

    def _stage(self, first: int, end: int) -> "_StageTables":
        if (first, end) not in self._stages:
            case = self._evaluator.case
            self._stages[first, end] = _StageTables(
                case.costs, first, end, case.micro_batches, splits_backward=case.schedule.splits_backward
            )
        return self._stages[first, end]


class _StageTables:
    def __init__(self, costs: ChainCosts, first: int, end: int, micro_batches: int, *, splits_backward: bool) -> None:
        self.by_layers = chunk_memory_function(
            costs, first, end, micro_batches=micro_batches, splits_backward=splits_backward
        )
        self.layers = StageLayerMemory.of(costs, first, end)
        self.times_us = costs.forward_us[first:end]
        forward_us = float(self.times_us.sum() + costs.entry_us[first]) if costs.has_backward[end - 1] else 0.0
        self.whole_us = 0.0, (micro_batches - 1) * forward_us, micro_batches * forward_us
        """Time to recompute the whole stage in a step, for each of `CHOICES`."""
        self.micro_batches = micro_batches
        is_short = end - first <= MOST_LAYERS
        self.subsets = LayerSubsets.of(self.layers, self.times_us) if is_short else None
        as_first, behind = most_bytes_freed(costs)
        saved = np.append(as_first[first], behind[first + 1 : end])
        self.most_saved = np.where(self.layers.can_recompute, saved, 0.0)
        """Upper bound of the bytes per micro-batch that recomputing each layer frees, shape (layers,)."""


class _Chunk:
    def __init__(self, stage: _StageTables, by_layers: ChunkMemoryFunction, counts: FloatArray) -> None:
        self.stage = stage
        self.whole: dict[int, _ChunkRecomputation] = {}
        """Recomputations of the whole stage, by index into `CHOICES`."""
        self.weights = counts @ by_layers.saved
        self.peak = np.where(counts > 0, by_layers.peak, -1).max(axis=1)
        self._by_layers, self._counts = by_layers, counts
        # Some of `ALLOCATIONS` are the maximum of two linear functions. Where such an allocation exists, both
        # functions are limited.
        is_flat = by_layers.least > by_layers.rest
        lines = [(self.weights, by_layers.rest)]
        if is_flat.any():
            lines.append((counts @ np.where(is_flat, 0, by_layers.saved), np.maximum(by_layers.least, by_layers.rest)))
        self._lines = [(weights, by_layers.always + counts @ sizes) for weights, sizes in lines]

    @cached_property
    def options(self) -> list[_ChunkRecomputation]:
        stage, subsets = self.stage, self.stage.subsets
        if subsets is None:
            return []
        sizes = self._by_layers.allocation_bytes(subsets.saved[:, None], subsets.peaks)
        held_bytes = self._by_layers.always + sizes @ self._counts.T
        return [
            *self.whole.values(),
            *(
                self._option(tuple((stage.layers.first + np.flatnonzero(recomputed)).tolist()), float(layers_us), held)
                for recomputed, layers_us, held in zip(subsets.recomputed, subsets.times_us, held_bytes, strict=True)
                if recomputed.any()
            ),
        ]

    def with_layers(self, recomputed: tuple[int, ...]) -> _ChunkRecomputation:
        saved, *levels = self.stage.layers.saved_and_peaks(recomputed)
        layers_us = float(self.stage.times_us[np.array(recomputed, dtype=np.int64) - self.stage.layers.first].sum())
        held_bytes = self._by_layers.always + self._counts @ self._by_layers.allocation_bytes(
            saved, np.array([*levels, 0.0])
        )
        return self._option(recomputed, layers_us, held_bytes)

    def _option(self, recomputed: tuple[int, ...], layers_us: float, held_bytes: FloatArray) -> _ChunkRecomputation:
        choice = LAYERS if recomputed else 0
        return _ChunkRecomputation(choice, recomputed, layers_us, self.stage.micro_batches * layers_us, held_bytes)

    def cheapest(self, room: FloatArray) -> _ChunkRecomputation | None:
        if self.options:
            able = (option for option in self.options if (option.bytes <= room).all())
            return min(able, key=lambda option: option.recompute_us, default=None)
        fitting = [option for option in self.whole.values() if (option.bytes <= room).all()]
        best = min(fitting, key=lambda option: option.recompute_us, default=None)
        if best is not None and best.recompute_us == 0:
            return best
        choice = cheapest_layers_within(self.stage.layers, self._limits(room), self.stage.times_us)
        if choice is None or not choice.recomputed:
            return best
        option = self.with_layers(choice.recomputed)
        # The limits are approximate, so check the exact memory.
        if (option.bytes > room).any() or (best is not None and best.recompute_us <= option.recompute_us):
            return best
        return option

    def _limits(self, room: FloatArray) -> list[MemoryLimit]:
        # Of limits that differ only in bytes, the smallest one counts.
        limits: dict[tuple[int, int], float] = {}
        for weights, fixed in self._lines:
            for weight, level, limit in zip(weights.tolist(), self.peak.tolist(), (room - fixed).tolist(), strict=True):
                key = round(weight), level
                limits[key] = min(limits.get(key, inf), limit)
        return [MemoryLimit(limit, *key) for key, limit in limits.items()]


def _excess_bytes(options: Iterable[_ChunkRecomputation], limit: float) -> float:
    held_bytes: FloatArray = np.sum([option.bytes for option in options], axis=0)
    return max(0.0, float(held_bytes.max()) - limit)


def _recomputation(options: Sequence[_ChunkRecomputation], limit: float) -> Recomputation:
    return Recomputation(
        choices=tuple(option.choice for option in options),
        recomputed=tuple(option.recomputed for option in options),
        layers_us=tuple(option.layers_us for option in options),
        recompute_us=sum(option.recompute_us for option in options),
        excess_bytes=_excess_bytes(options, limit),
    )


def _solve_jointly(chunks: Sequence[_Chunk], limit: float) -> list[list[_ChunkRecomputation]]:
    # Return the fastest combination of recomputations with which the device fits, then other fast ones. The list is
    # empty if there are too many combinations, or if none fits.
    tables = [chunk.options for chunk in chunks]
    recompute_us, places = np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    held_bytes: FloatArray = np.zeros((1, len(chunks[0].peak)))
    # Smallest memory of each chunk at each point in the step.
    least = [np.min([option.bytes for option in table], axis=0) if table else held_bytes[0] for table in tables]
    for n, table in enumerate(tables):
        if not table or len(held_bytes) * len(table) > _MOST_JOINTLY:
            return []
        added_bytes = np.array([option.bytes for option in table])
        held_bytes = (held_bytes[:, None] + added_bytes).reshape(-1, held_bytes.shape[1])
        recompute_us = (recompute_us[:, None] + np.array([option.recompute_us for option in table])).ravel()
        places = np.column_stack([np.repeat(places, len(table), axis=0), np.tile(np.arange(len(table)), len(places))])
        fits = (held_bytes + np.sum(least[n + 1 :], axis=0) <= limit).all(axis=1)
        held_bytes, recompute_us, places = held_bytes[fits], recompute_us[fits], places[fits]
    if not len(held_bytes):
        return []
    order = np.argsort(recompute_us, kind="stable")
    cheap = places[order[recompute_us[order] <= recompute_us[order[0]] * _NEARLY_CHEAPEST]]
    spared = [
        cheap[np.argmin([table[place].recompute_us for place in cheap[:, n].tolist()])]
        for n, table in enumerate(tables)
    ]
    rows = dict.fromkeys(tuple(row.tolist()) for row in (cheap[0], *spared))
    return [[table[place] for table, place in zip(tables, row, strict=True)] for row in rows]


def _start_by_stage(chunks: Sequence[_Chunk], limit: float) -> list[_ChunkRecomputation]:
    combinations = [list(options) for options in product(*(chunk.whole.values() for chunk in chunks))]
    return min(combinations, key=lambda each: (_excess_bytes(each, limit), sum(option.recompute_us for option in each)))


def _start_by_layer(chunks: Sequence[_Chunk], limit: float) -> list[_ChunkRecomputation]:
    options = [chunk.with_layers(()) for chunk in chunks]
    while True:
        held_bytes: FloatArray = np.sum([option.bytes for option in options], axis=0)
        moment = int(held_bytes.argmax())
        if held_bytes[moment] <= limit:
            return options
        best: tuple[float, int, int] | None = None
        for place, (chunk, option) in enumerate(zip(chunks, options, strict=True)):
            stage = chunk.stage
            counted = chunk.weights[moment] + (chunk.peak[moment] >= 0) * stage.layers.stacked
            left = stage.most_saved * counted
            left[np.array(option.recomputed, dtype=np.int64) - stage.layers.first] = 0.0
            if not left.any():
                continue
            at = int(np.argmax(left / np.maximum(stage.times_us, 1e-9)))
            ratio = float(left[at] / max(stage.times_us[at], 1e-9))
            if best is None or ratio > best[0]:
                best = ratio, place, stage.layers.first + at
        if best is None:
            return options
        _, place, layer = best
        options[place] = chunks[place].with_layers((*options[place].recomputed, layer))
