"""Costs of a profile at one micro-batch size, as arrays over the layers.

Costs between profiled micro-batch sizes are interpolated linearly. This is exact for saved bytes, which grow linearly
with the micro-batch size, and never too low for peaks, which are maxima of linear functions.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.chain_costs import ChainCosts, FixedLayerBytes, PassedGradients, Storages, prefix_sums
from planner.core.cost.size_costs import ProfiledLayerCosts, cost_bounds_without_details, costs_from_details
from planner.core.cost.storages import CrossingStorages
from planner.core.cost.ties import tied_parameters_of
from planner.core.cost.workload import workload_of
from planner.core.errors import UsageError
from planner.core.extensions import load_extension
from planner.core.values.profile import MemoryDetail, Profile


def covers_size(profile: Profile, micro_batch_size: int, *, extrapolate: bool) -> bool:
    """Return True if a profile can predict costs for a micro-batch size.

    Args:
        profile: Profile of a model.
        micro_batch_size: Samples per micro-batch.
        extrapolate: True to allow sizes outside the profiled range.
    """
    sizes = profile.micro_batch_sizes
    if extrapolate and len(sizes) > 1:
        return micro_batch_size >= 1
    return min(sizes) <= micro_batch_size <= max(sizes)


def saved_bytes(details: Sequence[MemoryDetail]) -> list[int]:
    """Return the bytes that each layer saves for backward; a storage counts once, for the layer that creates it."""
    return [int(size) for size in CrossingStorages(details).saved()]


def costs_at(profile: Profile, micro_batch_size: int, *, extrapolate: bool = False) -> ChainCosts:
    """Return the costs of every layer at one micro-batch size. For several sizes, a `CostTable` is faster.

    Args:
        profile: Profile of a model.
        micro_batch_size: Samples per micro-batch.
        extrapolate: True to allow sizes outside the profiled range.

    Raises:
        UsageError: The profile does not cover the size.
    """
    return CostTable(profile).at(micro_batch_size, extrapolate=extrapolate)


class CostTable:
    """Costs of a profile's layers, which can be interpolated for any micro-batch size."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        sizes = len(profile.micro_batch_sizes)
        self._exact = all(len(layer.detail) == sizes for layer in profile.layers)
        self.is_split_backward_assumed = not all(
            layer.backward_weight_us and (layer.split if self._exact else layer.weight_held_bytes)
            for layer in profile.layers
        )
        """True if time or memory of the split backward is assumed for some layer, not measured."""
        compiled = not self._exact and all(len(layer.program) == sizes for layer in profile.layers)
        self._read = (
            costs_from_details
            if self._exact
            else load_extension("MEMORY_MODELS", "program")
            if compiled
            else cost_bounds_without_details
        )
        self._sizes: dict[int, ProfiledLayerCosts] = {}

    def at(self, micro_batch_size: int, *, extrapolate: bool = False) -> ChainCosts:
        """Return the costs of every layer at `micro_batch_size`.

        Raises:
            UsageError: The profile does not cover the size.
        """
        weighted = [(self._at(n), weight) for n, weight in self._weights(micro_batch_size, extrapolate=extrapolate)]
        blended = {
            name: _blend([(getattr(costs, name), weight) for costs, weight in weighted])
            for name in ("gradients", "boundaries", "memory", "memory_model")
        }
        forward_us, backward_us = self.times_at(micro_batch_size, extrapolate=extrapolate)
        return ChainCosts(
            micro_batch_size=micro_batch_size,
            forward_us=forward_us,
            backward_us=backward_us,
            entry_us=self._entry_us(forward_us, micro_batch_size, extrapolate=extrapolate),
            exact=self._exact,
            compute_split_backward=cache(
                lambda: _blend([(costs.split_backward(), weight) for costs, weight in weighted])
            ),
            is_split_backward_assumed=self.is_split_backward_assumed,
            target=max(0.0, sum(weight * costs.target for costs, weight in weighted)),
            storages=_storages(weighted),
            relays=_relays(weighted),
            **self._constants,
            **blended,
        )

    def times_at(self, micro_batch_size: int, *, extrapolate: bool = False) -> tuple[FloatArray, FloatArray]:
        """Return the forward and the backward time of every layer at `micro_batch_size`, in microseconds."""
        layers, weights = self._profile.layers, self._weights(micro_batch_size, extrapolate=extrapolate)
        forward = [(np.array([layer.forward_us[n] for layer in layers]), weight) for n, weight in weights]
        backward = [(np.array([layer.backward_us[n] for layer in layers]), weight) for n, weight in weights]
        return _blend(forward), _blend(backward)

    def _entry_us(self, forward_us: FloatArray, micro_batch_size: int, *, extrapolate: bool) -> FloatArray:
        weights = self._weights(micro_batch_size, extrapolate=extrapolate)
        measured = [
            (np.array([layer.entry_us[n] if layer.entry_us else 0.0 for layer in self._profile.layers]), weight)
            for n, weight in weights
        ]
        # The dynamic programs require that no stage is faster if it also has the layer before its first one.
        before_us = prefix_sums(forward_us)[:-1]
        limited: FloatArray = before_us + np.minimum.accumulate(_blend(measured) - before_us)
        return np.maximum(limited, 0.0)

    def _weights(self, micro_batch_size: int, *, extrapolate: bool) -> list[tuple[int, float]]:
        profile = self._profile
        if not covers_size(profile, micro_batch_size, extrapolate=extrapolate):
            low, high = min(profile.micro_batch_sizes), max(profile.micro_batch_sizes)
            raise UsageError(
                f"micro-batch size {micro_batch_size} is outside the profiled range {low} to {high}",
                hint="profile that size too (`gpipe-plan profile --batch-sizes`)"
                + (", or allow `--extrapolate`" if len(profile.micro_batch_sizes) > 1 else ""),
            )
        return _interpolation_weights(profile.micro_batch_sizes, micro_batch_size)

    @cached_property
    def _constants(self) -> dict[str, Any]:
        layers = self._profile.layers
        return {
            "names": tuple(layer.name for layer in layers),
            "optimizer_us": np.array([layer.optimizer_us for layer in layers]),
            "state": FixedLayerBytes.of(layers),
            "optimizer_peaks_add": self._profile.optimizer_peak == "sum",
            "ties": tied_parameters_of(layers),
            "workload": workload_of(self._profile),
        }

    def _at(self, n: int) -> ProfiledLayerCosts:
        if n not in self._sizes:
            self._sizes[n] = self._read(self._profile.layers, n)
        return self._sizes[n]


class CostsAtSize:
    """Times and memory of a chain at one micro-batch size.

    Raises:
        UsageError: The profile does not cover the size.
    """

    def __init__(self, table: CostTable, micro_batch_size: int, *, extrapolate: bool, replicas: int) -> None:
        self._table, self._size, self._extrapolate, self._replicas = table, micro_batch_size, extrapolate, replicas
        self.forward_us, self.backward_us = table.times_at(micro_batch_size, extrapolate=extrapolate)

    @cached_property
    def costs(self) -> ChainCosts:
        """Times and memory of the chain's layers, computed on first use."""
        return self._table.at(self._size, extrapolate=self._extrapolate).of_replicas(self._replicas)


def _blend(weighted: Sequence[tuple[Any, float]]) -> Any:
    # Interpolate arrays, or records of arrays field by field. Tuples and None are taken from the nearest size.
    (record, _), *_ = weighted
    if record is None or isinstance(record, tuple):
        return max(weighted, key=itemgetter(1))[0]
    if isinstance(record, np.ndarray):
        return np.maximum(sum((weight * array for array, weight in weighted), np.zeros(())), 0.0)
    return type(record)(
        **{
            field.name: _blend([(getattr(each, field.name), weight) for each, weight in weighted])
            for field in fields(record)
        }
    )


def _storages(weighted: Sequence[tuple[ProfiledLayerCosts, float]]) -> Storages:
    # Two tensors may share a storage at some sizes only. Both then have an entry; one has 0 bytes at these sizes.
    places = sorted(set().union(*(costs.crossing for costs, _ in weighted)))
    sizes = np.zeros((len(places), 3))
    for costs, weight in weighted:
        by = [costs.crossing[place].bytes if place in costs.crossing else (0.0,) * 3 for place in places]
        sizes += weight * np.array(by).reshape(len(places), 3)
    by_readers, by_maker, by_nobody = np.maximum(sizes, 0.0).T
    until = [max(costs.crossing[p].until for costs, _ in weighted if p in costs.crossing) for p in places]
    return Storages(
        maker=np.array([origin for origin, _ in places], dtype=np.int64),
        until=np.array(until, dtype=np.int64),
        saved_by_readers=by_readers,
        saved_by_maker=by_maker,
        unsaved=by_nobody,
    )


def _relays(weighted: Sequence[tuple[ProfiledLayerCosts, float]]) -> PassedGradients:
    relays = sorted(set.intersection(*(set(costs.relays) for costs, _ in weighted)))
    sizes = [sum(weight * costs.relays[relay] for costs, weight in weighted) for relay in relays]
    return PassedGradients(
        first=np.array([relay.first for relay in relays], dtype=np.int64),
        last=np.array([relay.last for relay in relays], dtype=np.int64),
        bytes=np.maximum(np.array(sizes, dtype=float), 0.0),
    )


def _interpolation_weights(sizes: Sequence[int], size: int) -> list[tuple[int, float]]:
    order = sorted(range(len(sizes)), key=lambda n: sizes[n])
    if size in sizes:
        return [(sizes.index(size), 1.0)]
    if len(sizes) == 1:
        return [(0, 1.0)]
    points = [sizes[n] for n in order]
    right = min(max(bisect_left(points, size), 1), len(points) - 1)
    share = (size - points[right - 1]) / (points[right] - points[right - 1])
    return [(order[right - 1], 1 - share), (order[right], share)]
