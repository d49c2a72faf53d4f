"""Tests that peak memory under interleaved 1F1B is as predicted."""

from pathlib import Path
from typing import Final, get_args

import pytest

from planner.core.cost.costs import costs_at
from planner.core.values.plan import Recompute
from planner.model.load import load_model
from tests.support.cli import write_model
from tests.support.measure import profile_of_model
from tests.support.peaks import measured_peaks
from tests.support.training import Case, predicted_peaks
from tests.unit.executor.test_one_forward_one_backward import HIGHEST, LOWEST, MODEL, SIZE

pytestmark = pytest.mark.slow

DEVICES: Final = 2


def test_interleaved_peaks_are_as_predicted(tmp_path: Path) -> None:
    """A boundary tensor is 3 % of a peak, so a surplus one is seen. Two chunks of a device may share a parameter."""
    model = write_model(tmp_path, MODEL)
    tied = {False: {}, True: {"tied": "True"}}
    costs = {
        is_tied: costs_at(profile_of_model(load_model(str(model), settings=settings), sizes=(SIZE,)), SIZE)
        for is_tied, settings in tied.items()
    }
    cases = [
        Case(
            model=model,
            balance=balance,
            settings=(("tied", True),) if is_tied else (),
            recompute=choice,
            micro_batches=m,
            batch=m * SIZE,
            schedule="interleaved",
            chunks=len(balance) // DEVICES,
        )
        for balance, m, is_tied in (
            ((2, 6, 4, 2), 4, False),
            ((2, 6, 4, 2), 8, False),
            ((2, 3, 2, 3, 2, 2), 4, False),
            ((4, 4, 4, 2), 4, True),
        )
        for choice in get_args(Recompute)
        if choice != "layers"
    ]
    errors = {}
    for case, peaks in zip(cases, measured_peaks(cases, tmp_path), strict=True):
        for device, predicted in enumerate(predicted_peaks(case, costs[bool(case.settings)])):
            # Rows of one device hold the same peak.
            assert len(set(peaks[device::DEVICES])) == 1
            errors[case.balance, case.micro_batches, case.recompute, device] = predicted / peaks[device] - 1
    assert len(errors) == 4 * 3 * DEVICES
    assert {key: error for key, error in errors.items() if not LOWEST <= error <= HIGHEST} == {}
