"""Places for arrays of all stages, by hand; that programs have them so: tests/unit/tpu/test_pipeline.py."""

from dataclasses import replace

import pytest

from planner.core.values.profile import ArrayKind
from planner.tpu.places import shared_slots, slots_for, slots_waste_memory


def array(kind: str, num_bytes: int, plain_bytes: int) -> ArrayKind:
    """In loops it lies as elsewhere."""
    return ArrayKind(kind=kind, bytes=num_bytes, plain_bytes=plain_bytes, loop_bytes=num_bytes)


SQUARE, VECTOR = array("float32[4,4]", 80, 64), array("float32[4]", 20, 16)
LONG, NUMBERS = array("float32[15]", 60, 60), array("int32[4]", 20, 16)


def test_there_are_as_many_places_of_a_kind_as_some_stage_has_arrays() -> None:
    """Of every kind the larger number."""
    assert slots_for([{"a": 2, "b": 1}, {"a": 1}, {"b": 3}]) == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("stages", "share"),
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
def test_what_every_device_has_for_arrays_of_all_stages(stages: list[list[ArrayKind]], share: float) -> None:
    """Over what the fullest stage's arrays take, with their padding."""
    assert shared_slots(stages).share == pytest.approx(share)


def test_half_more_than_the_largest_stage_is_not_too_much() -> None:
    """Beyond that arrays are packed into vectors."""
    assert not slots_waste_memory(150, 100)
    assert slots_waste_memory(151, 100)


def test_in_places_arrays_lie_as_in_loops() -> None:
    """What only products read takes half there; in a vector it lies with the others."""
    narrow = replace(SQUARE, loop_bytes=40)
    assert shared_slots([[narrow], [narrow]]) == (0.5, False)
    assert shared_slots([[narrow, VECTOR], [narrow]]) == (pytest.approx((40 + 20) / 100), False)
    assert shared_slots([[narrow], [LONG]]) == (pytest.approx(64 / 80), True)


def test_wide_arrays_of_stages_take_turns_and_narrow_ones_do() -> None:
    """Of two squares in each stage one is narrow; where a stage has one more that is wide, another place is."""
    narrow = replace(SQUARE, loop_bytes=40)
    assert shared_slots([[SQUARE, narrow], [narrow, SQUARE]]).share == (80 + 40) / 160
    assert shared_slots([[SQUARE, narrow], [replace(SQUARE, count=2)]]).share == 1.0
