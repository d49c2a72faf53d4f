"""Peak memory of plans that are one program for all devices, computed by hand."""

from dataclasses import replace

import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.core.cost.partition import Partition
from planner.core.errors import UsageError
from planner.core.values.plan import Recompute
from planner.core.values.profile import ArrayKind, ProgramMemory
from planner.tpu.program_memory import program_memory
from tests.support.chains import chain, layer
from tests.support.peak_points import peak_points_with

M = 4


def array(name: str, num_bytes: int) -> tuple[ArrayKind, ...]:
    return (ArrayKind(kind=f"float32[{name}]", bytes=num_bytes, plain_bytes=num_bytes, loop_bytes=num_bytes),)


FIRST = replace(
    layer(
        "a",
        parameter_bytes=500,
        optimizer_bytes=3000,
        output_bytes=10,
        saved_bytes=500,
        forward_peak_bytes=7,
        backward_peak_bytes=20,
    ),
    program=(
        ProgramMemory(
            carried_bytes=300,
            peak_bytes=450,
            narrowed_bytes=50,
            padding_bytes=3,
            input_bytes=4,
            narrowed_input_bytes=2,
            laid_out_bytes=60,
            trained=array("a", 500),
            kept=array("kept a", 200),
            received=array("in", 4),
        ),
    ),
)
SECOND = replace(
    layer(
        "b",
        parameter_bytes=200,
        optimizer_bytes=900,
        output_bytes=1,
        saved_bytes=800,
        forward_peak_bytes=9,
        backward_peak_bytes=25,
    ),
    program=(
        ProgramMemory(
            carried_bytes=600,
            peak_bytes=750,
            narrowed_bytes=100,
            padding_bytes=5,
            target_bytes=2,
            trained=array("b", 200),
            kept=array("kept b", 800),
            received=array("out a", 10),
        ),
    ),
)
ROOM = (500 + 200) / 500  # for the second stage's parameters there is no place among the first's
KEPT = (800 + 200) / 800 * 800  # nor is there one for what the first keeps among what the second does
STATE, DATA = ROOM * (500 + 3000), M * 4 + M * 2
GAPS = 1.05  # between the arrays of one piece, and of copies
COPIES = GAPS * (100 + 2 * 5)  # of the second stage's weights, with room
BATCH = GAPS * M * 30  # the first stage has the mini-batch in 16 bits as its layer wants it
INVARIANT = ROOM * COPIES + BATCH


def costs() -> ChainCosts:
    """Return the costs of a chain of two layers."""
    return costs_at(chain(FIRST, SECOND), 1)


def partition(*recompute: Recompute, balance: tuple[int, ...] = (1, 1)) -> Partition:
    """Return a partition under GPipe."""
    return Partition(schedule="gpipe", micro_batches=M, balance=balance, recompute=recompute)


def test_every_device_holds_the_maximum_of_all_stages() -> None:
    """Parameters and activations of both stages share slots: nothing takes over 1.5 times the fullest stage."""
    memory = program_memory(costs(), partition("never", "never"))
    assert (memory.parameters, memory.optimizer, memory.gradients) == (ROOM * 500, ROOM * 3000, 0)
    forward = (KEPT + 10) + 10 + 1.1 * (800 + 9)
    assert memory.total == pytest.approx(STATE + DATA + M * (KEPT + 10) + INVARIANT + forward, abs=1)


@pytest.mark.parametrize("choice", ["always", "except-last"])
def test_the_peak_of_a_recomputed_stage_is_in_its_backward(choice: Recompute) -> None:
    memory = program_memory(costs(), partition(choice, choice))
    assert memory.gradients == ROOM * 500
    backward = ROOM * 500 + 10 + 2 * 10 + 1.1 * GAPS * 750
    assert memory.total == pytest.approx(STATE + DATA + M * 10 + INVARIANT + backward, abs=1)


def test_arrays_without_a_slot_in_the_fullest_stage_add_memory() -> None:
    square = ArrayKind(kind="float32[4,4]", bytes=80, plain_bytes=64, loop_bytes=80)
    vector = ArrayKind(kind="float32[4]", bytes=20, plain_bytes=16, loop_bytes=20)
    first, second = (
        replace(layer, program=(replace(layer.program[0], trained=arrays, kept=arrays, received=(vector,)),))
        for layer, arrays in ((FIRST, (replace(square, count=2),)), (SECOND, (square, vector)))
    )
    memory = program_memory(costs_at(chain(first, second), 1), partition("never", "never"))
    share = (160 + 20) / 160
    assert (memory.parameters, memory.optimizer) == (round(share * 500), share * 3000)
    assert memory.in_flight == pytest.approx(M * (10 + share * 800) + DATA, abs=1)


def test_packed_arrays_need_memory_to_be_unpacked() -> None:
    """Parameters in the forward; half of saved arrays, and gradients, in the backward."""
    names = (("float32[16]", "float32[4,4]"), ("float32[20]", "float32[4,5]"))
    arrays = [
        tuple(ArrayKind(kind=kind, bytes=100, plain_bytes=80, loop_bytes=100) for kind in kinds) for kinds in names
    ]
    vector = ArrayKind(kind="float32[4]", bytes=20, plain_bytes=16, loop_bytes=20)
    first, second = (
        replace(layer, program=(replace(layer.program[0], trained=kinds, kept=kinds, received=(vector,)),))
        for layer, kinds in zip((FIRST, SECOND), arrays, strict=True)
    )
    memory = program_memory(costs_at(chain(first, second), 1), partition("never", "never"))
    share = 160 / 200  # without padding
    assert (memory.parameters, memory.gradients) == (share * 500, share * 500)
    backward = share * 500 + (10 + share * 800) + 20 + 1.1 * (25 + 3 * 500 + 800 / 2)
    held = share * (500 + 3000) + DATA + M * (10 + share * 800) + share * COPIES + BATCH
    assert memory.total == pytest.approx(held + backward, abs=1)


def test_a_narrowed_mini_batch_takes_half_the_memory() -> None:
    (program,) = FIRST.program
    as_it_is = replace(FIRST, program=(replace(program, narrowed_input_bytes=0),))
    half, whole = (
        program_memory(costs_at(chain(first, SECOND), 1), partition("never", "never")) for first in (FIRST, as_it_is)
    )
    assert whole.total - half.total == pytest.approx(GAPS * M * 30, abs=1)


def test_a_program_of_one_stage_has_the_memory_of_the_stage() -> None:
    alone = stage_memory(costs(), 0, 2, peak_points_with(M), recompute="always")
    assert program_memory(costs(), partition("always", balance=(2,))) == alone


def test_a_profile_without_records_of_programs_is_refused() -> None:
    """So is one without kinds of arrays."""
    without = (replace(layer.program[0], received=()) for layer in (FIRST, SECOND))
    for first, second in (((), ()), ((one,) for one in without)):
        costs = costs_at(chain(replace(FIRST, program=first), replace(SECOND, program=second)), 1)
        with pytest.raises(UsageError, match="does not record the memory that layers need in one compiled program"):
            program_memory(costs, partition("never", "never"))
