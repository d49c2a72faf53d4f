"""Tests that peak memory under 1F1B, plain and interleaved, is as predicted."""

from pathlib import Path
from typing import Final

import pytest

from planner.core.cost.costs import costs_at
from planner.model.load import load_model
from tests.support.cli import write_model
from tests.support.measure import profile_of_model
from tests.support.peaks import measured_peaks
from tests.support.training import Case, predicted_peaks

pytestmark = pytest.mark.slow

SIZE: Final = 128
BALANCE: Final = (4, 6, 4)
DEVICES: Final = 2
LOWEST, HIGHEST = -0.01, 0.05

# What crosses the boundaries is as large as what a layer saves, so that one tensor too many is seen at once.
MODEL: Final = """
import torch
from torch import nn

def build_model(tied=False):
    widths = (64, 256, 256, 256, 256, 256, 256, 16)
    model = nn.Sequential(*(layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.Tanh())))
    if tied:
        model[10].weight = model[2].weight
    return model

def example_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randn(batch_size, 16)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def test_1f1b_peaks_are_as_predicted(tmp_path: Path) -> None:
    """Within -1 % / +5 % on every stage."""
    model = write_model(tmp_path, MODEL)
    costs = costs_at(profile_of_model(load_model(str(model)), sizes=(SIZE,)), SIZE)
    # With M = 3 = K the first stage has all micro-batches in flight, as under GPipe. From M = 5 it still
    # runs forwards after the backwards of its warm-up.
    cases = [
        Case(model=model, balance=BALANCE, recompute=choice, micro_batches=m, batch=m * SIZE, schedule="1f1b")
        for m, choice in ((3, "never"), (4, "except-last"), (5, "never"), (5, "always"), (8, "except-last"))
    ]
    errors = {}
    for case, peaks in zip(cases, measured_peaks(cases, tmp_path), strict=True):
        for k, predicted in enumerate(predicted_peaks(case, costs)):
            errors[case.micro_batches, case.recompute, k] = predicted / peaks[k] - 1
    assert len(errors) == len(cases) * 3
    assert {key: error for key, error in errors.items() if not LOWEST <= error <= HIGHEST} == {}


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
        for balance, m, is_tied, choice in (
            ((2, 6, 4, 2), 4, False, "always"),
            ((2, 6, 4, 2), 8, False, "never"),
            ((2, 3, 2, 3, 2, 2), 4, False, "except-last"),
            ((4, 4, 4, 2), 4, True, "never"),
            ((4, 4, 4, 2), 4, True, "always"),
        )
    ]
    errors = {}
    for case, peaks in zip(cases, measured_peaks(cases, tmp_path), strict=True):
        for device, predicted in enumerate(predicted_peaks(case, costs[bool(case.settings)])):
            # Rows of one device hold the same peak.
            assert len(set(peaks[device::DEVICES])) == 1
            errors[case.balance, case.micro_batches, case.recompute, device] = predicted / peaks[device] - 1
    assert len(errors) == len(cases) * DEVICES
    assert {key: error for key, error in errors.items() if not LOWEST <= error <= HIGHEST} == {}
