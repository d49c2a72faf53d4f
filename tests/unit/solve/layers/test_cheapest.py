"""Choice of layers to recompute, compared with every subset of small chains."""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.solve.layers.cheapest import LayerChoice, cheapest_recomputed_layers
from planner.solve.layers.stage_times import least_recompute_us
from tests.support.chains import chain, layer, random_profile, record, tensor, with_programs
from tests.support.peak_points import peak_points_with

COUNTS = ((1, 1), (2, 2), (4, 4), (4, 2), (5, 1))
"""M and micro-batches in flight."""


def total(costs: ChainCosts, first: int, end: int, counts: tuple[int, int], recomputed: tuple[int, ...]) -> int:
    """Return the bytes at the peak."""
    return stage_memory(
        costs,
        first,
        end,
        peak_points_with(*counts),
        recompute="layers",
        recomputed=recomputed,
    ).total


def cheapest(
    costs: ChainCosts, first: int, end: int, counts: tuple[int, int], limit: float, *, most_choices: int = 4096
) -> LayerChoice | None:
    """Return the cheapest layers to recompute."""
    return cheapest_recomputed_layers(
        costs,
        first,
        end,
        peak_points_with(*counts),
        limit_bytes=limit,
        most_choices=most_choices,
    )


def bounds(costs: ChainCosts, firsts: list[int], stop: int, counts: tuple[int, int], limit: float) -> np.ndarray:
    """Return the lower bounds of all stages."""
    return least_recompute_us(costs, np.array(firsts), stop, peak_points_with(*counts), limit_bytes=limit)


def limits(least: int, most: int, rng: random.Random) -> list[int]:
    """Return memory limits from just infeasible to loose."""
    return [least - 1, least, least + 1, most - 1, most, *(rng.randint(least, most) for _ in range(6))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["additive", "exact", "compiled"])
@pytest.mark.parametrize("seed", range(20))
def test_cheapest_layers_equal_the_best_subset(seed: int, kind: str) -> None:
    """Few labels give a result that is never cheaper, and a bound that is never above the best subset."""
    rng = random.Random(seed)
    profile = random_profile(seed, 7, exact=kind == "exact", sizes=(1, 4))
    costs = costs_at(with_programs(profile, seed) if kind == "compiled" else profile, rng.choice([1, 3, 4]))
    counts = rng.choice(COUNTS)
    first = rng.randrange(3)
    end = rng.randrange(first + 2, 8)
    subsets = [s for count in range(end - first + 1) for s in combinations(range(first, end), count)]
    sizes = {subset: total(costs, first, end, counts, subset) for subset in subsets}
    times = {subset: float(costs.forward_us[list(subset)].sum()) for subset in subsets}
    for limit in limits(min(sizes.values()), sizes[()], rng):
        best = min((times[subset] for subset in subsets if sizes[subset] <= limit), default=None)
        found = cheapest(costs, first, end, counts, limit)
        narrow = cheapest(costs, first, end, counts, limit, most_choices=3)
        bound = float(bounds(costs, [0, first] if first else [0], 7, counts, limit)[-1, end - 1])
        if best is None:
            assert found is narrow is None
            continue
        assert narrow is not None
        assert found.is_optimal
        assert found.recompute_us == pytest.approx(best, rel=1e-9) == times[found.recomputed]
        assert sizes[found.recomputed] <= limit
        assert sizes[narrow.recomputed] <= limit
        assert bound <= best * (1 + 1e-9)
        assert narrow.lower_bound_us <= best * (1 + 1e-9) <= narrow.recompute_us * (1 + 2e-9)


def blocks(num_layers: int, *, noise: float = 0.0, seed: int = 0) -> ChainCosts:
    """Return transformer blocks that save their inputs and 16 times as much inside; `noise` varies sizes and times."""
    rng = random.Random(seed)
    size = 1 << 20
    layers = []
    for n in range(num_layers):
        internal = int(16 * size * (1 + noise * rng.random()))
        detail = record(
            internal=internal,
            given=[tensor(size, kept=True)],
            made=[tensor(size)],
            forward=internal + 3 * size,
            no_grad=5 * size,
            first_backward=internal + 16 * size,
            backward=internal + 4 * size,
        )
        layers.append(
            layer(f"block.{n}", parameter_bytes=12 * size, forward_us=1000 * (1 + noise * rng.random()), detail=detail)
        )
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize("num_layers", [24, 200])
def test_equal_layers_are_recomputed_as_few_as_possible(num_layers: int) -> None:
    costs, counts = blocks(num_layers), (8, 8)
    never, always = (total(costs, 0, num_layers, counts, tuple(range(n))) for n in (0, num_layers))
    for share in (0.2, 0.5, 0.8):
        limit = always + share * (never - always)
        found = cheapest(costs, 0, num_layers, counts, limit, most_choices=256)
        assert found.is_optimal
        assert total(costs, 0, num_layers, counts, found.recomputed) <= limit
        # Recomputing front layers lowers the level in backward, too: no other choice of one less can fit.
        assert total(costs, 0, num_layers, counts, tuple(range(len(found.recomputed) - 1))) > limit


def test_large_chains_are_solved_exactly() -> None:
    costs, counts = blocks(200, noise=1.0), (8, 8)
    never, always = (total(costs, 0, 200, counts, tuple(range(n))) for n in (0, 200))
    for share in (0.2, 0.5, 0.8):
        limit = always + share * (never - always)
        found = cheapest(costs, 0, 200, counts, limit)
        assert found.is_optimal
        bound = bounds(costs, list(range(200)), 200, counts, limit)
        assert 0.98 * found.recompute_us <= bound[0, -1] <= found.recompute_us
        # A longer stage never needs less.
        assert (np.diff(bound[0]) >= -1e-6).all()


def test_bound_is_true_if_labels_run_out() -> None:
    """In this subset sum, saved bytes are proportional to times, so every subset is equally good."""
    rng = random.Random(1)
    layers = []
    for n in range(60):
        size = rng.randint(10**5, 10**6)
        detail = record(internal=size, forward=size, first_backward=size, backward=size)
        layers.append(layer(str(n), forward_us=size / 1000, saved_bytes=size, detail=detail))
    costs, counts = costs_at(chain(*layers), 1), (8, 8)
    limit = 0.4 * total(costs, 0, 60, counts, ())
    found = cheapest(costs, 0, 60, counts, limit, most_choices=200)
    assert total(costs, 0, 60, counts, found.recomputed) <= limit
    assert not found.is_optimal
    assert 0.99 * found.recompute_us <= found.lower_bound_us <= found.recompute_us


def test_nothing_is_recomputed_if_everything_fits() -> None:
    """Layers that take no time are not recomputed either."""
    costs = replace(blocks(6), forward_us=np.array([0.0, 5.0, 0.0, 5.0, 0.0, 5.0]))
    never = total(costs, 0, 6, (4, 4), ())
    found = cheapest(costs, 0, 6, (4, 4), never)
    assert found == LayerChoice(recomputed=(), recompute_us=0.0, lower_bound_us=0.0)
    free = cheapest(costs, 0, 6, (4, 4), never - 1)
    assert (len(free.recomputed), free.recompute_us, free.is_optimal) == (1, 0.0, True)


@pytest.mark.parametrize("fits", [False, True])
def test_no_choice_exists_if_parameters_do_not_fit(*, fits: bool) -> None:
    costs = blocks(4)
    limit = float(total(costs, 0, 4, (2, 2), (0, 1, 2, 3)) if fits else costs.state.parameters.sum())
    assert (cheapest(costs, 0, 4, (2, 2), limit) is not None) is fits
    assert bool(np.isfinite(bounds(costs, [0], 4, (2, 2), limit)[0, -1])) is fits


def test_part_of_the_bound_table_equals_the_whole_table() -> None:
    costs = blocks(12, noise=1.0)
    limit = 0.5 * total(costs, 0, 12, (4, 4), ())
    whole = bounds(costs, list(range(12)), 12, (4, 4), limit)
    part = bounds(costs, [3, 4, 7], 10, (4, 4), limit)
    assert part.shape == (3, 7)
    for row, first in enumerate((3, 4, 7)):
        # The prices that are tried differ, so the bounds may by rounding.
        np.testing.assert_allclose(part[row, first - 3 :], whole[first, first:10], rtol=1e-9, atol=1e-6)
