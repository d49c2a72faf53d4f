"""Autocast's copies of weights, and stages in which nothing is trained: worked out by hand."""

from dataclasses import replace

import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.device_memory import chunk_memory
from planner.core.cost.memory import stage_memory
from planner.core.cost.moments import PARTS
from planner.core.values.plan import Recompute, StageMemory
from tests.support.chains import chain, even_chain, layer
from tests.support.moments import moments_with


def costs_of(*, gradients: tuple[int, ...] = (10, 14, 22), step: int = 0) -> ChainCosts:
    """10, 14, 22 bytes of parameters, half of them as copies."""
    casts = (5, 7, 11)
    return costs_at(even_chain((10, 14, 22), gradients, cast_bytes=casts, optimizer_peak_bytes=step), 1)


def memory_of(
    costs: ChainCosts, first: int, end: int, *, m: int = 1, recompute: Recompute = "never", in_flight: int | None = None
) -> StageMemory:
    """Under GPipe, unless fewer are in flight."""
    return stage_memory(costs, first, end, moments_with(m, in_flight), recompute=recompute)


def test_copies_are_not_there_in_the_optimizers_step() -> None:
    """Whose peak is the highest here: autocast has been left."""
    memory = memory_of(costs_of(step=500), 0, 3)
    assert (memory.working, memory.casts) == (500, 0)


def test_one_micro_batch() -> None:
    """All copies once; in the first backward gradients of parameters appear layer by layer, as without autocast."""
    costs = costs_of()
    with_casts, without = (
        memory_of(c, 0, 3) for c in (costs, replace(costs, state=replace(costs.state, casts=costs.state.casts * 0)))
    )
    assert with_casts.casts == 5 + 7 + 11
    # Nothing else is different: the levels of later backwards are, but there are none.
    assert with_casts.total == without.total + 23


def test_gradients_of_copies_wait_in_later_backwards() -> None:
    """Copies 7 + 11; layer 1 first meets those of layer 2 behind it, and in the end all of them turn into gradients."""
    memory = memory_of(costs_of(), 1, 3, m=4, in_flight=1)
    assert memory.casts == 18
    # saved: 20 + 8 in front of layer 2, whose peak of 70 comes on top, and the output of 8 that the engine holds; or
    # at the end what is transient, at most 70 less the layer's own copies, and 18 bytes that wait.
    assert memory.working == max(70 + 11 + 8, 28 + 70 + 8, (70 - 7) + 18 + 8)


def test_many_micro_batches_share_the_copies() -> None:
    """Findings: once per context, not per micro-batch in flight."""
    assert {memory_of(costs_of(), 0, 2, m=m, recompute="always").casts for m in (1, 4, 16)} == {12}


def test_a_chunk_holds_its_copies_beside_what_is_in_flight() -> None:
    """Until its device leaves autocast."""
    chunk = chunk_memory(costs_of(), 0, 2, micro_batches=4, recompute="never")
    assert chunk.parts[PARTS.index("casts")] == 12
    assert chunk.always.casts == 0


@pytest.mark.parametrize("shared", [0, 22])
def test_a_tied_copy_counts_once(shared: int) -> None:
    """Where both layers surely have one of it."""
    first = layer("a", parameter_bytes=22, cast_bytes=11, tied=("b.weight",) if shared else (), tied_bytes=shared)
    second = layer("b", parameter_bytes=30, cast_bytes=15, tied=("a.weight",) if shared else (), tied_bytes=shared)
    embedding = replace(first, cast_bytes=0)
    both, one = (costs_at(chain(other, second), 1) for other in (first, embedding))
    assert chunk_memory(both, 0, 2, micro_batches=2, recompute="never").parts[PARTS.index("casts")] == 26 - shared // 2
    assert chunk_memory(one, 0, 2, micro_batches=2, recompute="never").parts[PARTS.index("casts")] == 15


@pytest.mark.parametrize("recompute", ["except-last", "always"])
def test_nothing_is_recomputed_where_nothing_is_trained(recompute: Recompute) -> None:
    """In front of the first trained layer there is no backward; the stage behind sends no gradient back."""
    frozen, trained = costs_of(gradients=(0, 0, 22)), costs_of()
    assert memory_of(frozen, 0, 2, m=4, recompute=recompute) == memory_of(frozen, 0, 2, m=4)
    assert memory_of(trained, 0, 2, m=4, recompute=recompute) != memory_of(trained, 0, 2, m=4)
    sent, nothing = (memory_of(costs, 2, 3, m=4, recompute="always").transfer for costs in (trained, frozen))
    assert (sent, nothing) == (8, 0)
