"""Deviations of a run from its plan."""

from dataclasses import replace

import pytest

from planner.api.options.verifying import VerifyOptions
from planner.api.texts import parse_fraction, parse_two_fractions
from planner.core.cost.evaluate import Evaluation
from planner.core.judge.drift import ENOUGH_STEPS, deviating_figures, drift_text
from planner.core.judge.verification import DEFAULT_TOLERANCE
from planner.core.values.balance import Balance
from planner.core.values.profile import Model
from planner.core.values.run_report import RunReport
from planner.emit.native import emit_native
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of
from tests.support.runs import report_of


@pytest.fixture
def run() -> tuple[Balance, RunReport]:
    """Return cuts of six stages on three devices in a V, and a run as planned."""
    profile = replace(random_profile(3, 12, sizes=(1, 2, 4)), model=Model(source="model.py:build_model"))
    profile = replace(
        profile,
        layers=tuple(replace(x, parameter_bytes=10**8 + x.parameter_bytes) for x in profile.layers),
    )
    inputs = replace(inputs_of(3, 12, reserve_bytes=10**6), schedule="zbv", chunks=2)
    plan = solve(profile, Request(inputs=inputs, balance=(2,) * 6, micro_batches=6))
    (balance,) = emit_native(plan, profile, folder=".", profile_folder=".").plans
    report = report_of(plan, Evaluation.of(plan, profile))
    whole = [need - 10**6 for need in plan.peak_bytes_by_device()]
    stages = tuple(replace(s, peak_bytes=whole[min(s.index, 5 - s.index)]) for s in report.stages)
    return balance, replace(report, step_us=(plan.predicted.step_us,) * (2 + ENOUGH_STEPS), stages=stages)


def slower(report: RunReport, factor: float) -> RunReport:
    """Return the run with other step times."""
    return replace(report, step_us=tuple(factor * time for time in report.step_us))


def fuller(report: RunReport, factor: float) -> RunReport:
    """Return the run with another peak on the middle device."""
    changed = (replace(s, peak_bytes=int(factor * s.peak_bytes)) if s.index in (1, 4) else s for s in report.stages)
    return replace(report, stages=tuple(changed))


def test_deviations_beyond_the_tolerances_of_verify_are_reported(run: tuple[Balance, RunReport]) -> None:
    balance, report = run
    off = {
        "as planned": report,
        "within": fuller(slower(report, 1.09), 1.009),
        "slow": slower(report, 1.5),
        "fast": slower(report, 0.8),
        "full": fuller(report, 1.02),
        "both": fuller(slower(report, 2.0), 0.5),
    }
    drifts = {name: deviating_figures(balance, each, are_times_judged=True) for name, each in off.items()}
    assert {name: [row.what for row in drift] for name, drift in drifts.items()} == {
        "as planned": [],
        "within": [],
        "slow": ["step_us"],
        "fast": ["step_us"],
        "full": ["peak_bytes"],
        "both": ["step_us", "peak_bytes"],
    }
    text = drift_text(drifts["both"])
    assert text.startswith("not as planned: a step took ")
    assert "(+100.0%, 10% are allowed); the peak of device 1 was " in text
    assert text.endswith("(-50.0%, -5% to +1% are allowed)")
    assert "and 2 others deviate" in drift_text(
        deviating_figures(replace(balance, stages=tuple(replace(s, peak_bytes=0) for s in balance.stages)), report,
                 are_times_judged=True)
    )  # fmt: skip


def test_incomparable_runs_have_no_deviations(run: tuple[Balance, RunReport]) -> None:
    """Such runs are too short, on another device, of another batch size, or on a busy machine."""
    balance, report = run
    slow = slower(report, 1.5)
    rates = tuple(2 * report.batch / time * 1e6 for time in slow.step_us)
    assert deviating_figures(balance, slow, are_times_judged=True)
    assert not deviating_figures(balance, slow, are_times_judged=False)
    for other in (
        replace(slow, step_us=slow.step_us[1:]),
        replace(slow, device=replace(slow.device, kind="cuda")),
        replace(slow, samples_per_s=rates),
        replace(slow, stages=(replace(slow.stages[0], core_share=0.4), *slow.stages[1:])),
    ):
        assert not deviating_figures(balance, other, are_times_judged=True)
    assert not deviating_figures(replace(balance, planned=None), slow, are_times_judged=True)
    assert balance.planned is not None
    for_tpus = replace(balance, planned=replace(balance.planned, device="tpu"))
    assert not deviating_figures(for_tpus, slow, are_times_judged=True)
    assert deviating_figures(for_tpus, replace(slow, device=replace(slow.device, kind="tpu")), are_times_judged=True)
    assert deviating_figures(balance, replace(slow, samples_per_s=tuple(r / 2 for r in rates)), are_times_judged=True)


def test_tolerances_equal_the_defaults_of_verify() -> None:
    asked = VerifyOptions()
    shares = (parse_fraction("", asked.tolerance_time), *parse_two_fractions("", asked.tolerance_memory))
    assert shares == (DEFAULT_TOLERANCE.step, DEFAULT_TOLERANCE.memory_below, DEFAULT_TOLERANCE.memory_above)
