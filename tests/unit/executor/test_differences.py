"""Differences between gradients of a stage and of the reference."""

import pytest
import torch

from planner.executor.equivalence.differences import (
    StageDifferences,
    compare_gradients,
    largest_unexplained_difference,
)
from planner.model.reference_state import ReferenceState

NAME = 'the gradient of "bias"'


@pytest.mark.parametrize(
    ("right", "value", "accepted"),
    [
        (1e-8, 5e-7, True),  # rounding errors only, as of a bias before a batch normalization
        (1e-5, 2e-5, False),
        (1e-2, 1.01e-2, True),
        (1e-2, 1.02e-2, False),
    ],
)
def test_small_gradients_are_compared_relative_to_the_largest(right: float, value: float, *, accepted: bool) -> None:
    """Relative to a largest gradient of 1, float32 has rounding errors of about 1e-7."""
    reference = ReferenceState(
        loss=0.0, tensors={"gradient:bias": torch.tensor([right])}, numbers={}, groups={}, largest_gradient=1.0
    )
    found = StageDifferences()
    compare_gradients(found, {"bias": torch.tensor([value])}, reference)
    assert (largest_unexplained_difference(found.relative, lambda: {NAME: 1.0}) == "") == accepted
