"""Tests of boundary tensors with permuted dimensions."""

from pathlib import Path

import pytest

from planner.core.schedule import SCHEDULES
from planner.core.values.plan import ScheduleName
from tests.support.peaks import PROMISED, predictions
from tests.support.training import Case, run_cases

pytestmark = pytest.mark.slow

KINDS = Path(__file__).parents[2] / "zoo/models/memory_kinds.py"
RECURRENT = {"kind": "recurrent"}
LATER = pytest.mark.nightly


@pytest.mark.parametrize("schedule", ["1f1b", *(pytest.param(n, marks=LATER) for n in ("gpipe", "interleaved", "zbv"))])
def test_gradients_with_permuted_boundaries_equal_the_model(tmp_path: Path, schedule: ScheduleName) -> None:
    """For a smaller last mini-batch, and in evaluation: an LSTM returns time-first memory."""
    is_chunked = SCHEDULES[schedule].is_chunked
    case = Case(
        model=KINDS,
        settings=tuple(RECURRENT.items()),
        balance=(2, 1, 1, 2) if is_chunked else (3, 3),
        chunks=2 if is_chunked else 1,
        schedule=schedule,
        recompute="never" if is_chunked else "except-last",
        sizes=(8, 6),
        steps=2,
        evaluate=5,
    )
    (result,) = run_cases([case], tmp_path, ("split",))
    assert result["split_relative"] < 1e-5
    assert result["split_loss"] < 1e-6
    assert result["split_evaluated"] < 1e-6


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=LATER)])
def test_permuted_boundaries_are_not_copied(tmp_path: Path, schedule: ScheduleName) -> None:
    found = predictions(KINDS, RECURRENT, tmp_path, micro_batches=(6,), recompute=("never",), schedule=schedule)
    assert len(found) == 3
    for predicted, measured in found.values():
        assert PROMISED.allows_peak(predicted=predicted, measured=measured), (predicted, measured)
