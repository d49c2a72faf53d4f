"""Tests that peak memory with split backward is as predicted."""

from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest

from planner.core.cost.costs import costs_at
from planner.core.schedule import SCHEDULES
from planner.model.load import load_model
from planner.model.precision import in_precision
from tests.support.cli import write_model
from tests.support.measure import profile_of_model
from tests.support.peaks import even, measured_peaks
from tests.support.training import ROOT, Case, predicted_peaks
from tests.unit.executor.test_one_forward_one_backward import HIGHEST, LOWEST, MODEL

pytestmark = pytest.mark.slow

NAMES: Final = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward)
EACH_ONCE: Final = tuple(zip(NAMES, cycle(("never", "always")), strict=False))
Errors = dict[tuple[str, str, int], float]
SAMPLES: Final = (
    ("transformer_lm", (("layers", 6), ("width", 64), ("feed_forward", 256), ("vocabulary", 512), ("tokens", 64)), 4),
    pytest.param("mlp", (("width", 256),), 64, marks=pytest.mark.nightly),
)


def relative_errors(model: Path, folder: Path, *, devices: int, size: int, **further: Any) -> Errors:
    """Return the relative errors of predicted peaks by schedule, recomputation and device; M = 2 K."""
    settings = {name: str(value) for name, value in further.get("settings", ())}
    loaded = in_precision(load_model(str(model), settings=settings), further.get("dtype", ""))
    costs = costs_at(profile_of_model(loaded, sizes=(size,)), size)
    plans = further.pop("plans")
    cases = [
        Case(
            model=model,
            balance=even(len(costs.names), devices * (1 + SCHEDULES[name].is_chunked)),
            recompute=recompute,
            micro_batches=2 * devices,
            batch=2 * devices * size,
            schedule=name,
            chunks=1 + SCHEDULES[name].is_chunked,
            **further,
        )
        for name, recompute in plans
    ]
    errors: Errors = {}
    for case, peaks in zip(cases, measured_peaks(cases, folder), strict=True):
        for device, predicted in enumerate(predicted_peaks(case, costs)):
            measured = peaks[device]  # the first chunks are in the order of the devices
            errors[case.schedule, case.recompute, device] = predicted / measured - 1
    return errors


def outside(errors: Errors) -> Errors:
    """Return the errors that are not within -1 % / +5 %."""
    return {key: error for key, error in errors.items() if not LOWEST <= error <= HIGHEST}


def test_peaks_with_split_backward_are_as_predicted(tmp_path: Path) -> None:
    """Every second layer saves its output for I, and the next layer saves the same tensor for W."""
    model = write_model(tmp_path, MODEL)
    plans = [*EACH_ONCE, (NAMES[0], "always")]
    errors = relative_errors(model, tmp_path, devices=3, size=128, plans=plans)
    assert len(errors) == len(plans) * 3
    assert outside(errors) == {}


def test_autocast_weight_caches_are_counted(tmp_path: Path) -> None:
    """Cached weights wait for the last W. With some whole backwards there are two copies of each."""
    model = write_model(tmp_path, MODEL)
    plans = (("zb-h1", "never"), ("zb-h1", "always"), ("zbv", "never"), ("dualpipev", "always"))
    errors = relative_errors(model, tmp_path, devices=2, size=128, dtype="bf16-mixed", plans=plans)
    assert len(errors) == len(plans) * 2
    assert outside(errors) == {}


@pytest.mark.parametrize(("name", "settings", "size"), SAMPLES)
def test_peaks_of_sample_models_are_as_predicted(name: str, settings: Any, size: int, tmp_path: Path) -> None:
    model = ROOT / f"sample_models/{name}.py"
    plans = (("zb-h2", "except-last"), ("zbv", "never"))
    errors = relative_errors(model, tmp_path, devices=2, size=size, settings=settings, plans=plans)
    assert len(errors) == len(plans) * 2
    assert outside(errors) == {}
