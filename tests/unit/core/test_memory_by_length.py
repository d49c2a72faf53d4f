"""Peaks of stages by number of layers, in chains without skips."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import peak_bytes_of_stages
from planner.core.cost.passing import has_no_skips_or_ties
from planner.core.values.plan import Recompute
from planner.core.values.profile import LayerProfile
from tests.support.chains import random_profile, with_programs
from tests.support.peak_points import peak_points_with

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")
KINDS = ("exact", "bound", "programs")
LAYERS, SIZES = 9, (1, 4)


def simple_costs(kind: str, seed: int) -> ChainCosts:
    """Return costs between two profiled sizes; for odd seeds the first layers are frozen."""
    profile = random_profile(seed, LAYERS, exact=kind == "exact", sizes=SIZES)
    layers = [_without_skips(each) for each in profile.layers] if kind == "exact" else list(profile.layers)
    if seed % 2:
        layers[:2] = [replace(each, gradient_bytes=0, optimizer_bytes=0) for each in layers[:2]]
    profile = replace(profile, layers=tuple(layers))
    return costs_at(with_programs(profile, seed) if kind == "programs" else profile, 3)


def _without_skips(layer: LayerProfile) -> LayerProfile:
    return replace(
        layer,
        detail=tuple(
            replace(detail, inputs=detail.inputs[:1], outputs=(replace(detail.outputs[0], alias=-1, relayed=False),))
            for detail in layer.detail
        ),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_peaks_by_length_equal_peaks_by_last_layer(kind: str, seed: int, in_flight: int) -> None:
    costs, points, firsts = simple_costs(kind, seed), peak_points_with(5, in_flight), np.arange(LAYERS)
    assert has_no_skips_or_ties(costs)
    by_end = peak_bytes_of_stages(costs, firsts, slice(0, LAYERS), points, choices=CHOICES)
    by_length = peak_bytes_of_stages(costs, firsts, 4, points, choices=CHOICES)
    for ends, lengths in zip(by_end, by_length, strict=True):
        assert lengths.shape == (LAYERS, 4)
        for first in firsts:
            stages = ends[first, first : first + 4]
            assert lengths[first, : len(stages)].tolist() == stages.tolist()
    assert (by_length[0] != by_length[2]).any()


def test_chain_with_skips_is_not_simple() -> None:
    """A skipping tensor depends on where the stage ends."""
    chains = [costs_at(random_profile(seed, LAYERS, exact=True), 1) for seed in range(20)]
    assert sum(map(has_no_skips_or_ties, chains)) < len(chains) / 2
    for costs in chains:
        spans = costs.storages.until - costs.storages.maker
        sizes = costs.storages.saved_by_readers + costs.storages.saved_by_maker + costs.storages.unsaved
        assert has_no_skips_or_ties(costs) == (not sizes[spans > 1].any() and not costs.relays.bytes.any())
