"""Peak memory of stages that are compiled as one program, computed by hand."""

from dataclasses import replace

import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.core.values.plan import Recompute, StageMemory
from planner.core.values.profile import ProgramMemory
from tests.support.chains import chain, layer
from tests.support.peak_points import peak_points_with

FIRST = replace(
    layer("a", parameter_bytes=100, output_bytes=10, saved_bytes=50, forward_peak_bytes=7, backward_peak_bytes=20),
    program=(
        ProgramMemory(
            carried_bytes=30,
            peak_bytes=45,
            narrowed_bytes=50,
            padding_bytes=3,
            input_bytes=4,
            narrowed_input_bytes=2,
            laid_out_bytes=6,
        ),
    ),
)
SECOND = replace(
    layer("b", parameter_bytes=200, output_bytes=1, saved_bytes=80, forward_peak_bytes=9, backward_peak_bytes=25),
    program=(ProgramMemory(carried_bytes=60, peak_bytes=75, narrowed_bytes=100, padding_bytes=5, target_bytes=2),),
)
GAPS = 1.05  # between arrays of one piece, not of what a loop keeps
STRAIGHT = GAPS * (30 + 75)  # of both layers
PADDING = GAPS * (2 * (3 + 5) + 6)
NARROWED = GAPS * (150 + 4 * 2)
SAVED = 50 + 80


def costs(forward_peak_bytes: int = 9) -> ChainCosts:
    """Return the costs of a chain of two layers."""
    return costs_at(chain(FIRST, replace(SECOND, forward_peak_bytes=(forward_peak_bytes,))), 1)


def memory_of(
    costs: ChainCosts, first: int, m: int, recompute: Recompute, recomputed: tuple[int, ...] = ()
) -> StageMemory:
    """Return the memory of the layers from `first`, under GPipe."""
    return stage_memory(costs, first, 2, peak_points_with(m), recompute=recompute, recomputed=recomputed)


@pytest.mark.parametrize(
    ("recompute", "m", "forward", "in_flight", "working"),
    [
        ("never", 1, 9, 6, STRAIGHT + PADDING),
        ("always", 1, 9, 1 + 6, STRAIGHT + PADDING),
        ("never", 4, 9, 4 * SAVED + 4 * 6, 25 + PADDING + NARROWED),
        ("never", 4, 100, 4 * SAVED + 4 * 6, SAVED + 100 + PADDING),
        ("always", 4, 100, 4 * 1 + 4 * 6, STRAIGHT + PADDING + NARROWED),
        ("layers", 4, 9, 4 * SAVED + 4 * 6, 25 + PADDING + NARROWED),
    ],
)
def test_memory_of_one_stage(recompute: Recompute, m: int, forward: int, in_flight: int, working: float) -> None:
    """A single micro-batch runs straight; a loop holds arrays for all of them."""
    memory = memory_of(costs(forward), 0, m, recompute)
    assert (memory.parameters, memory.gradients, memory.transfer) == (300, 300, 0)
    assert memory.in_flight == in_flight
    assert memory.working == pytest.approx(working, abs=1)


def test_saved_arrays_count_in_their_own_shape_until_put_into_rows() -> None:
    (program,) = SECOND.program
    in_rows = replace(program, carried_bytes=200, reshaped_bytes=1)
    for record, waiting in ((in_rows, 200 - 80), (replace(program, reshaped_bytes=1), 0), (program, 0)):
        second = replace(SECOND, forward_peak_bytes=(100,), program=(record,))
        memory = memory_of(costs_at(chain(FIRST, second), 1), 0, 4, "never")
        assert memory.working == round(SAVED + waiting + 100 + PADDING)


def test_memory_of_a_later_stage() -> None:
    """Received tensors and their gradients count."""
    memory = memory_of(costs(), 1, 1, "never")
    assert (memory.in_flight, memory.transfer, memory.working) == (10 + 2, 10, round(GAPS * (75 + 2 * 5)))


def test_recomputing_a_layer_moves_memory_from_in_flight_to_working() -> None:
    kept, again = memory_of(costs(), 0, 4, "layers"), memory_of(costs(), 0, 4, "layers", (1,))
    assert kept.in_flight - again.in_flight == 4 * (80 - 1)
    assert again.working - kept.working == 80
