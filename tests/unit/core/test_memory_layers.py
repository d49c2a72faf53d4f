"""Peak memory of a stage that recomputes some of its layers: examples worked out by hand, and properties."""

import random
from collections.abc import Collection
from itertools import combinations

import numpy as np
import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.device_memory import chunk_memory, chunk_memory_function
from planner.core.cost.layer_memory import StageLayerMemory, most_bytes_freed, saved_and_peaks_without_recomputation
from planner.core.cost.memory import peak_bytes_of_stages, stage_memory, stage_memory_functions
from planner.core.values.plan import StageMemory
from tests.support.chains import chain, layer, random_profile, record, tensor
from tests.support.peak_points import peak_points_with

COUNTS = ((1, 1), (2, 2), (4, 4), (4, 2), (5, 1))
"""M and micro-batches in flight."""


def memory_of(costs: ChainCosts, first: int, end: int, recomputed: Collection[int], *, m: int = 1) -> StageMemory:
    """Return the memory under GPipe."""
    return stage_memory(costs, first, end, peak_points_with(m), recompute="layers", recomputed=recomputed)


def exact() -> ChainCosts:
    """Return three layers that save their inputs.

    Boundaries: 8, 16, 32 and 4 bytes (the loss), targets of 2. Forward peaks are 40, 60, 50, without gradients 25, 45,
    35; first backward 70, 120, 90, later 60, 100, 80.
    """
    crossing = (8, 16, 32, 4)
    peaks = ((40, 25, 70, 60), (60, 45, 120, 100), (50, 35, 90, 80))
    layers = [
        layer(
            f"layers.{n}",
            parameter_bytes=(5, 7, 11)[n],
            optimizer_bytes=(10, 14, 22)[n],
            detail=record(
                internal=10 * (n + 1),
                given=[tensor(crossing[n], kept=True)],
                made=[tensor(crossing[n + 1])],
                forward=peaks[n][0],
                no_grad=peaks[n][1],
                first_backward=peaks[n][2],
                backward=peaks[n][3],
                target=2 if n == 2 else 0,
            ),
        )
        for n in range(3)
    ]
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize(
    ("first", "end", "recomputed", "m", "peak"),
    [
        # Layer 1 leaves its output, which layer 2 keeps, and not its 20 bytes: 26 + 32 + 30, and the loss. Its backward
        # is the peak: above the 26 of layer 0, with the gradients of layer 2 and the loss.
        (0, 3, (1,), 1, 26 + 120 + 11 + 4),
        (0, 3, (1,), 3, 2 * 92 + 26 + 120 + 11 + 4),
        # Layers 0 and 2: 16 + 52 + the loss. Now layer 2's backward is the highest.
        (0, 3, (0, 2), 3, 2 * 72 + 68 + 90 + 4),
        # All: inputs alone, 16 + 32, and the loss.
        (0, 3, (0, 1, 2), 3, 2 * 52 + 16 + 120 + 11 + 4),
        # In the middle: received 16, output 32, its gradient; layer 1's 20 bytes do not wait.
        (1, 2, (1,), 3, 2 * (16 + 32) + 16 + 32 + 120 + 32),
    ],
)
def test_exact_memory_with_recomputed_layers_by_hand(first, end, recomputed, m, peak):
    """The first backward is the peak."""
    parameters = sum((5, 7, 11)[first:end])
    data = m * (8 * (first == 0) + 2 * (end == 3))
    assert memory_of(exact(), first, end, recomputed, m=m).total == 3 * parameters + data + peak


def test_output_gradient_is_held_while_a_layer_is_recomputed() -> None:
    busy = record(
        given=[tensor(8, kept=True)], made=[tensor(32)], forward=500, no_grad=400, first_backward=60, backward=60
    )
    after = record(given=[tensor(32, kept=True)], made=[tensor(4)], first_backward=10, backward=10)
    costs = costs_at(chain(layer("busy", detail=busy), layer("after", detail=after)), 1)
    # The mini-batch, what is computed again, the gradient of its output, and the loss.
    assert memory_of(costs, 0, 2, (0,)).total == 8 + 500 + 32 + 4
    assert memory_of(costs, 0, 2, ()).total == 8 + 500
    # At the end of a stage the engine's buffer is that gradient; the output that was sent is alive, too.
    assert memory_of(costs, 0, 1, (0,)).total == 8 + 500 + 32 + 32


def activations(*, keeps_output: bool) -> ChainCosts:
    """Return three layers that do not save their inputs; boundaries have 10 to 80 bytes."""
    layers = [
        layer(
            str(n),
            detail=record(internal=1, given=[tensor(10 * 2**n)], made=[tensor(20 * 2**n, kept=keeps_output)]),
        )
        for n in range(3)
    ]
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize(
    ("keeps_output", "recomputed", "saved"),
    [
        # Tensors between layers are held only as inputs of recomputed layers. 80 bytes are sent.
        (False, (), 3 + 80),
        (False, (1,), 2 + 20 + 80),
        (False, (1, 2), 1 + 20 + 40 + 80),
        (False, (0, 1, 2), 20 + 40 + 80),
        # Every layer keeps its output, but a recomputed one does not.
        (True, (), 3 + 20 + 40 + 80),
        (True, (0,), 2 + 40 + 80),
        (True, (0, 1), 1 + 20 + 80),
        (True, (1,), 2 + 20 + 80),
        (True, (0, 1, 2), 20 + 40 + 80),
    ],
)
def test_input_of_a_recomputed_layer_is_held(*, keeps_output: bool, recomputed: tuple[int, ...], saved: int) -> None:
    costs = activations(keeps_output=keeps_output)
    assert StageLayerMemory.of(costs, 0, 3).saved_and_peaks(recomputed).saved == saved
    more = memory_of(costs, 0, 3, recomputed, m=9).total - memory_of(costs, 0, 3, recomputed, m=8).total
    assert more == saved + 10  # and the input of one micro-batch


@pytest.mark.parametrize(("recomputed", "saved"), [((), 0), ((1,), 100), ((2,), 100), ((1, 2), 100), ((3,), 50)])
def test_relayed_tensor_of_recomputed_layers_is_held_once(recomputed: tuple[int, ...], saved: int) -> None:
    """Layers 1 and 2 relay 100 bytes."""
    passing = record(given=[tensor(100)], made=[tensor(100, alias=0)])
    layers = [
        layer("0", detail=record(given=[tensor(8)], made=[tensor(100)])),
        layer("1", detail=passing),
        layer("2", detail=record(given=[tensor(100)], made=[tensor(50)])),
        layer("3", detail=record(given=[tensor(50)], made=[tensor(4)])),
    ]
    assert StageLayerMemory.of(costs_at(chain(*layers), 1), 0, 4).saved_and_peaks(recomputed).saved == saved + 4


def in_place() -> ChainCosts:
    """Return layers that make 100 bytes, view them, write into them, and make 4."""
    layers = [
        layer("0", detail=record(given=[tensor(8)], made=[tensor(100)])),
        layer("view", detail=record(given=[tensor(100)], made=[tensor(100, alias=0)])),
        layer(
            "in place",
            detail=record(given=[tensor(100)], made=[tensor(100, alias=0, kept=True)], writes_input=True),
        ),
        layer("3", detail=record(given=[tensor(100)], made=[tensor(4)])),
    ]
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize(
    ("first", "recomputed", "saved"),
    [(0, (), 100), (0, (3,), 100), (0, (1,), 200), (0, (2,), 200), (1, (), 100), (1, (1,), 100), (1, (2,), 200)],
)
def test_recomputed_layer_saves_a_copy_of_an_input_that_is_written(first, recomputed, saved):
    """At the start of a stage, the received tensor is the saved one."""
    assert StageLayerMemory.of(in_place(), first, 4).saved_and_peaks(recomputed).saved == saved + 4


def additive() -> ChainCosts:
    """Return four layers without exact records; outputs of 10 to 40 are part of 50 to 80 saved bytes."""
    layers = [
        layer(
            f"layers.{n}",
            parameter_bytes=100 * (n + 1),
            output_bytes=10 * (n + 1),
            saved_bytes=50 + 10 * n,
            forward_peak_bytes=5 + n,
            backward_peak_bytes=15 + n,
        )
        for n in range(4)
    ]
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize(
    ("recomputed", "saved", "working"),
    [((), 130, 17), ((1,), 90, 16 + 60), ((2,), 90, 17 + 70), ((1, 2), 50, 17 + 70)],
)
def test_additive_memory_with_recomputed_layers_by_hand(recomputed: tuple[int, ...], saved: int, working: int) -> None:
    memory = memory_of(additive(), 1, 3, recomputed, m=4)
    assert memory == StageMemory.of(
        parameters=500,
        gradients=500,
        optimizer=0,
        buffers=0,
        in_flight=4 * (10 + saved),
        transfer=30 + 10,
        working=working,
        reserve=0,
    )


def test_unsaved_output_is_held_for_a_recomputed_layer() -> None:
    """A layer saves 4 of its 10 output bytes; the next layer is recomputed and needs all."""
    layers = [layer("a", output_bytes=10, saved_bytes=4), layer("b", output_bytes=1, saved_bytes=7)]
    costs = costs_at(chain(*layers), 1)
    assert memory_of(costs, 0, 2, (), m=3).in_flight == 3 * (4 + 7)
    assert memory_of(costs, 0, 2, (1,), m=3).in_flight == 3 * (10 + 1)


# ---- what holds for any chain


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [False, True])
def test_recomputing_no_layers_equals_never(*, is_exact: bool) -> None:
    compared = 0
    for seed in range(3):
        costs = costs_at(random_profile(seed, 6, exact=is_exact, sizes=(1, 4)), (1, 3, 4)[seed % 3])
        for m, in_flight in COUNTS:
            for first, end in combinations(range(7), 2):
                never, layers = (
                    stage_memory(costs, first, end, peak_points_with(m, in_flight), recompute=choice)
                    for choice in ("never", "layers")
                )
                assert never.total == layers.total
                compared += 1
    assert compared == 3 * 5 * 21


@pytest.mark.parametrize("is_exact", [False, True])
def test_stage_memory_functions_equal_the_memory_model(*, is_exact: bool) -> None:
    """The solver uses the form fixed + weight * saved + level."""
    costs = costs_at(random_profile(5, 6, exact=is_exact, sizes=(1, 4)), 3)
    rng = random.Random(1)
    for m, in_flight in COUNTS:
        firsts = np.array([0, 1, 3])
        functions = stage_memory_functions(costs, firsts, 6, peak_points_with(m, in_flight))
        for row, first in enumerate(firsts.tolist()):
            for end in range(first + 1, 7):
                recomputed = [n for n in range(first, end) if rng.random() < 0.5]
                saved, *levels = StageLayerMemory.of(costs, first, end).saved_and_peaks(recomputed)
                totals = [
                    float(function.fixed[row, end - 1])
                    + function.weight * saved
                    + (levels[function.peak] if function.peak is not None else 0)
                    for function in functions
                ]
                memory = stage_memory(
                    costs, first, end, peak_points_with(m, in_flight), recompute="layers", recomputed=recomputed
                )
                assert max(totals) == memory.total == sum(size for _, size in memory.items())


@pytest.mark.parametrize("is_exact", [False, True])
def test_least_levels_are_at_most_those_of_any_choice(*, is_exact: bool) -> None:
    """They are equal if no layer is recomputed."""
    for seed in range(8):
        costs = costs_at(random_profile(seed, 5, exact=is_exact, sizes=(1, 4)), 3)
        firsts, savings = np.array([1, 2]), most_bytes_freed(costs)
        saved, levels = saved_and_peaks_without_recomputation(costs, firsts, slice(1, 5))
        for row, first in enumerate(firsts.tolist()):
            for end in range(first + 1, 6):
                stage = StageLayerMemory.of(costs, first, end)
                assert stage.saved_and_peaks(()).saved == saved[row, end - 2]
                assert stage.saved_and_peaks(()).backward == levels.backward[row, end - 2]
                for count in range(end - first + 1):
                    for recomputed in combinations(range(first, end), count):
                        spared = sum(savings[int(n > first)][n] for n in recomputed)
                        found = stage.saved_and_peaks(recomputed)
                        assert found.saved + spared >= saved[row, end - 2]
                        for level, least in zip(found[1:], levels, strict=True):
                            assert level + is_exact * spared >= least[row, end - 2]


def test_peaks_of_many_stages_refuse_per_layer_recomputation() -> None:
    with pytest.raises(ValueError, match="use `stage_memory`"):
        peak_bytes_of_stages(exact(), np.arange(3), slice(0, 3), peak_points_with(2), choices=["layers"])


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("is_exact", [False, True])
def test_memory_of_a_chunk_as_function_of_recomputed_layers(*, is_exact: bool, splits_backward: bool) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        costs = costs_at(random_profile(seed, 6, exact=is_exact, sizes=(1, 4)), 2).of_replicas(1 + seed % 2)
        first, end = rng.randrange(3), rng.randrange(3, 7)
        chunk = chunk_memory_function(costs, first, end, micro_batches=3, splits_backward=splits_backward)
        layers = StageLayerMemory.of(costs, first, end)
        for count in range(end - first + 1):
            some = tuple(rng.sample(range(first, end), count))
            alone = chunk_memory(
                costs, first, end, micro_batches=3, recompute="layers", recomputed=some, splits_backward=splits_backward
            )
            assert chunk.always == alone.always.total
            saved, *levels = layers.saved_and_peaks(some)
            assert chunk.allocation_bytes(saved, np.array([*levels, 0.0])).tolist() == alone.allocation_bytes.tolist()
