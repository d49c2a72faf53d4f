"""Slots for arrays of all stages, computed by hand."""

from dataclasses import replace

import pytest

from planner.core.values.profile import ArrayKind
from planner.tpu.slots import count_slots, shared_slots, slots_waste_memory


def array(kind: str, num_bytes: int, plain_bytes: int) -> ArrayKind:
    """Return a kind that takes as much in loops as elsewhere."""
    return ArrayKind(kind=kind, bytes=num_bytes, plain_bytes=plain_bytes, loop_bytes=num_bytes)


SQUARE, VECTOR = array("float32[4,4]", 80, 64), array("float32[4]", 20, 16)
LONG, NUMBERS = array("float32[15]", 60, 60), array("int32[4]", 20, 16)


def test_slots_of_a_kind_are_the_maximum_over_stages() -> None:
    assert count_slots([{"a": 2, "b": 1}, {"a": 1}, {"b": 3}]) == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("stages", "ratio"),
    [
        ([[SQUARE, VECTOR], [SQUARE]], 1.0),
        ([[replace(SQUARE, count=3), VECTOR], [SQUARE, SQUARE, VECTOR]], 1.0),
        # The vector and the numbers have no place in the first stage.
        ([[SQUARE], [VECTOR], [NUMBERS]], (80 + 20 + 20) / 80),
        # Two places would take 124 bytes for 64: one vector as long as the longest stage.
        ([[SQUARE], [LONG]], 64 / 80),
        # A vector of each type.
        ([[SQUARE], [LONG], [NUMBERS]], (64 + 16) / 80),
        ([[SQUARE]], 1.0),
        ([[], []], 1.0),
        ([], 1.0),
    ],
)
def test_ratio_of_slots_to_the_fullest_stages_bytes(stages: list[list[ArrayKind]], ratio: float) -> None:
    assert shared_slots(stages).ratio == pytest.approx(ratio)


def test_slots_may_take_half_more_than_the_largest_stage() -> None:
    """Otherwise arrays are packed into vectors."""
    assert not slots_waste_memory(150, 100)
    assert slots_waste_memory(151, 100)


def test_arrays_in_slots_have_their_size_in_loops() -> None:
    """Arrays that only products read take half there, but not in a vector."""
    narrow = replace(SQUARE, loop_bytes=40)
    assert shared_slots([[narrow], [narrow]]) == (0.5, False)
    assert shared_slots([[narrow, VECTOR], [narrow]]) == (pytest.approx((40 + 20) / 100), False)
    assert shared_slots([[narrow], [LONG]]) == (pytest.approx(64 / 80), True)


def test_wide_and_narrow_arrays_have_separate_slots() -> None:
    narrow = replace(SQUARE, loop_bytes=40)
    assert shared_slots([[SQUARE, narrow], [narrow, SQUARE]]).ratio == (80 + 40) / 160
    assert shared_slots([[SQUARE, narrow], [replace(SQUARE, count=2)]]).ratio == 1.0
