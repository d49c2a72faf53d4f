"""Places for arrays of all stages, by hand; that programs have them so: tests/unit/executor/test_jax_pipeline.py."""

from dataclasses import replace

import pytest

from planner.core.cost.places import are_vectors, places_for, share_of_places
from planner.core.values.profile import ArrayKind

SQUARE = ArrayKind(kind="float32[4,4]", bytes=80, plain_bytes=64)
VECTOR = ArrayKind(kind="float32[4]", bytes=20, plain_bytes=16)
LONG = ArrayKind(kind="float32[15]", bytes=60, plain_bytes=60)
NUMBERS = ArrayKind(kind="int32[4]", bytes=20, plain_bytes=16)


def test_there_are_as_many_places_of_a_kind_as_some_stage_has_arrays() -> None:
    """Of every kind the larger number."""
    assert places_for([{"a": 2, "b": 1}, {"a": 1}, {"b": 3}]) == {"a": 2, "b": 3}


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
    assert share_of_places(stages) == pytest.approx(share)


def test_half_more_than_the_largest_stage_is_not_too_much() -> None:
    """Beyond that arrays are packed into vectors."""
    assert not are_vectors(150, 100)
    assert are_vectors(151, 100)


def test_what_only_products_read_takes_half() -> None:
    """In places; in a vector it lies with the others."""
    narrow = replace(SQUARE, narrow=True)
    assert share_of_places([[narrow], [narrow]]) == 0.5
    assert share_of_places([[narrow, VECTOR], [narrow]]) == pytest.approx((40 + 20) / 100)
    assert share_of_places([[narrow], [LONG]]) == pytest.approx(64 / 80)
