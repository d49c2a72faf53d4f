"""Memory of the autocast weight cache, and of stages without trained layers, worked out by hand."""

from dataclasses import replace

import pytest

from planner.core.cost.chain_costs import ChainCosts, TiedParameters
from planner.core.cost.costs import costs_at
from planner.core.cost.device_memory import chunk_memory
from planner.core.cost.memory import stage_memory
from planner.core.cost.peak_points import ALLOCATIONS
from planner.core.values.plan import Recompute, StageMemory
from tests.support.chains import chain, even_chain, layer
from tests.support.peak_points import peak_points_with


def costs_of(*, gradients: tuple[int, ...] = (10, 14, 22), step: int = 0) -> ChainCosts:
    """Return layers with 10, 14 and 22 bytes of parameters, and half as many in the weight cache."""
    casts = (5, 7, 11)
    return costs_at(even_chain((10, 14, 22), gradients, cast_bytes=casts, optimizer_peak_bytes=step), 1)


def memory_of(
    costs: ChainCosts, first: int, end: int, *, m: int = 1, recompute: Recompute = "never", in_flight: int | None = None
) -> StageMemory:
    """Return the memory under GPipe, unless fewer micro-batches are in flight."""
    return stage_memory(costs, first, end, peak_points_with(m, in_flight), recompute=recompute)


def test_weight_cache_is_empty_in_the_optimizer_step() -> None:
    memory = memory_of(costs_of(step=500), 0, 3)
    assert (memory.working, memory.casts) == (500, 0)


def test_weight_cache_with_one_micro_batch() -> None:
    costs = costs_of()
    with_casts, without = (
        memory_of(c, 0, 3) for c in (costs, replace(costs, state=replace(costs.state, casts=costs.state.casts * 0)))
    )
    assert with_casts.casts == 5 + 7 + 11
    # Nothing else is different: the levels of later backwards are, but there are none.
    assert with_casts.total == without.total + 23


def test_gradients_of_cached_weights_wait_in_later_backwards() -> None:
    """Layer 1 runs while the cached gradients of layer 2 wait; at the end all of them become gradients."""
    memory = memory_of(costs_of(), 1, 3, m=4, in_flight=1)
    assert memory.casts == 18
    # saved: 20 + 8 in front of layer 2, whose peak of 70 comes on top, and the output of 8 that the engine holds; or
    # at the end what is transient, at most 70 less the layer's own copies, and 18 bytes that wait.
    assert memory.working == max(70 + 11 + 8, 28 + 70 + 8, (70 - 7) + 18 + 8)


def test_micro_batches_share_the_weight_cache() -> None:
    assert {memory_of(costs_of(), 0, 2, m=m, recompute="always").casts for m in (1, 4, 16)} == {12}


def test_chunk_holds_its_weight_cache_until_the_device_leaves_autocast() -> None:
    chunk = chunk_memory(costs_of(), 0, 2, micro_batches=4, recompute="never")
    assert chunk.allocation_bytes[ALLOCATIONS.index("casts")] == 12
    assert chunk.always.casts == 0


@pytest.mark.parametrize("shared", [0, 22])
def test_tied_cached_weight_counts_once(shared: int) -> None:
    first = layer("a", parameter_bytes=22, cast_bytes=11, tied=("b.weight",) if shared else (), tied_bytes=shared)
    second = layer("b", parameter_bytes=30, cast_bytes=15, tied=("a.weight",) if shared else (), tied_bytes=shared)
    embedding = replace(first, cast_bytes=0)
    both, one = (costs_at(chain(other, second), 1) for other in (first, embedding))
    assert (
        chunk_memory(both, 0, 2, micro_batches=2, recompute="never").allocation_bytes[ALLOCATIONS.index("casts")]
        == 26 - shared // 2
    )
    assert (
        chunk_memory(one, 0, 2, micro_batches=2, recompute="never").allocation_bytes[ALLOCATIONS.index("casts")] == 15
    )


@pytest.mark.parametrize("recompute", ["never", "always", "layers"])
def test_gradient_of_a_shared_copy_counts_once_at_the_end(recompute: Recompute) -> None:
    apart = costs_at(even_chain((1000, 1000, 22), (1000, 1000, 22), cast_bytes=(500, 500, 11)), 1)
    tie = TiedParameters(
        first=0,
        second=1,
        parameter_bytes=1000.0,
        gradient_bytes=1000.0,
        optimizer_bytes=0.0,
        cast_bytes=500.0,
        converted_bytes=1000.0,
    )
    assert memory_of(apart, 0, 3, m=4, recompute=recompute).working > 500 + 500 + 11
    assert memory_of(replace(apart, ties=(tie,)), 0, 3, m=4, recompute=recompute).working < 600


@pytest.mark.parametrize("recompute", ["except-last", "always"])
def test_frozen_stages_are_not_recomputed(recompute: Recompute) -> None:
    """Layers before the first trained one have no backward, and no gradient is sent to them."""
    frozen, trained = costs_of(gradients=(0, 0, 22)), costs_of()
    assert memory_of(frozen, 0, 2, m=4, recompute=recompute) == memory_of(frozen, 0, 2, m=4)
    assert memory_of(trained, 0, 2, m=4, recompute=recompute) != memory_of(trained, 0, 2, m=4)
    sent, nothing = (memory_of(costs, 2, 3, m=4, recompute="always").transfer for costs in (trained, frozen))
    assert (sent, nothing) == (8, 0)
