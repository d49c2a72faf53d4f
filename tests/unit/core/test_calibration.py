"""Calibration by synthetic runs on synthetic machines, and more accurate predictions with it."""

from dataclasses import replace

import pytest

from planner.api.options.solving import SolverOptions
from planner.api.solver_request import request_of
from planner.core.cost.evaluate import Evaluation
from planner.core.errors import MeasurementError, UsageError
from planner.core.judge.calibration import calibration_of
from planner.core.judge.verification import Tolerance, verification_of
from planner.core.values.cluster import Link
from planner.core.values.plan import ProfileReference
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of
from tests.support.runs import report_of, slower

LINK = Link(latency_us=50.0, bytes_per_s=1e9, blocking=True)
TOLERANCE = Tolerance(step=0.1, memory_below=0.01, memory_above=0.05, memory_slack_bytes=0)
REFERENCE = ProfileReference(path="profile.yaml", digest="sha256:0")


def plan_of(profile, balance=(3, 3, 2), *, schedule="gpipe", recompute="auto", link=LINK):
    inputs = replace(inputs_of(len(balance), 8, link=link, overhead_us=20.0, recompute=recompute), schedule=schedule)
    return solve(profile, Request(inputs=inputs, balance=balance, micro_batches=4))


def step_with(profile, plan, found):
    """Return the step time predicted with a calibration."""
    asked = SolverOptions(
        devices=len(plan.balance),
        mem="1000TB",
        batch=8,
        micro_batches=4,
        schedule=plan.schedule,
        balance=plan.balance,
        recompute=plan.inputs.recompute,
        calibration=found,
    )
    return solve(profile, request_of(profile, REFERENCE, asked)).predicted.step_us


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("seed", range(3))
def test_calibrated_prediction_equals_the_run(schedule, recompute, seed):
    """The machine differs only by what a calibration stores."""
    profile = random_profile(seed, 8, sizes=(1, 2, 4))
    plan = plan_of(profile, schedule=schedule, recompute=recompute)
    evaluation = Evaluation.of(plan, profile)
    machine = slower(plan.inputs.cluster, compute=1.3, overhead_us=35.0, link=1.7)
    report = report_of(plan, replace(evaluation, cluster=machine))
    found = calibration_of(plan, evaluation, report)
    measured = report.step_us[-1]
    assert found.compute == pytest.approx(1.3, rel=1e-3)
    assert found.overhead_us == pytest.approx(35.0, abs=0.2)
    before, after = plan.predicted.step_us, step_with(profile, plan, found)
    assert abs(after - measured) < 0.05 * abs(before - measured)
    assert after == pytest.approx(measured, rel=0.02)
    assert found.step_ratio == pytest.approx(measured / after, rel=1e-3)


def test_calibration_of_a_plan_with_chunks():
    """Links also lead back to the first device."""
    profile = random_profile(3, 8, sizes=(1, 2, 4))
    inputs = replace(inputs_of(2, 8, link=LINK, overhead_us=20.0), schedule="interleaved", chunks=2)
    plan = solve(profile, Request(inputs=inputs, balance=(2, 2, 3, 1), micro_batches=4))
    evaluation = Evaluation.of(plan, profile)
    machine = slower(plan.inputs.cluster, compute=1.2, overhead_us=30.0, link=1.5)
    report = report_of(plan, replace(evaluation, cluster=machine))
    whole = plan.peak_bytes_by_device()
    stages = tuple(replace(run, peak_bytes=whole[run.index % 2]) for run in report.stages)
    found = verification_of(plan, profile, replace(report, stages=stages), TOLERANCE)
    assert [row.agrees for row in found.compared if row.what == "peak_bytes"] == [True, True]
    assert found.calibration.compute == pytest.approx(1.2, rel=1e-3)
    assert found.calibration.link.latency_us == pytest.approx(1.5 * LINK.latency_us, rel=0.05)
    assert [boundary.index for boundary in report.boundaries] == [0, 1, 2]


def test_calibration_of_a_calibrated_plan_is_the_same():
    profile = random_profile(1, 8, sizes=(1, 2, 4))
    plan = plan_of(profile)
    plan = solve(
        profile,
        Request(inputs=replace(plan.inputs, compute=1.25), balance=plan.balance, micro_batches=4),
    )
    evaluation = Evaluation.of(plan, profile)
    found = calibration_of(plan, evaluation, report_of(plan, evaluation))
    assert found.compute == pytest.approx(1.25, rel=1e-3)
    assert found.overhead_us == pytest.approx(plan.inputs.overhead_us, abs=0.1)
    assert found.link.latency_us == pytest.approx(LINK.latency_us, rel=0.01)
    assert found.link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.01)
    assert found.link.blocking


def test_calibrated_reserve_is_the_largest_excess_over_the_prediction():
    """Context and libraries count; the reserve is never negative."""
    profile = random_profile(2, 8, sizes=(1, 2, 4))
    plan = plan_of(profile)
    evaluation = Evaluation.of(plan, profile)
    report = report_of(plan, evaluation)
    assert calibration_of(plan, evaluation, report).reserve_bytes == 0
    stages = tuple(
        replace(run, peak_bytes=run.peak_bytes + add, outside_bytes=outside)
        for run, add, outside in zip(report.stages, (100, 500, -900), (1000, 200, 1000), strict=True)
    )
    assert calibration_of(plan, evaluation, replace(report, stages=stages)).reserve_bytes == 1100
    below = tuple(replace(run, peak_bytes=1) for run in report.stages)
    assert calibration_of(plan, evaluation, replace(report, stages=below)).reserve_bytes == 0


def test_calibration_of_one_stage_has_no_link():
    profile = random_profile(2, 8, sizes=(1, 2, 4))
    plan = plan_of(profile, (8,))
    evaluation = Evaluation.of(plan, profile)
    report = report_of(plan, evaluation)
    assert calibration_of(plan, evaluation, report).link is None
    assert report.bubble == pytest.approx(0.0, abs=1e-6)


def test_unknown_link_gets_the_measured_latency():
    profile = random_profile(2, 8, sizes=(1, 2, 4))
    plan = plan_of(profile, link=Link())
    evaluation = Evaluation.of(plan, profile)
    link = Link(latency_us=70.0, blocking=True)
    report = report_of(plan, replace(evaluation, cluster=replace(evaluation.cluster, link=link)))
    assert calibration_of(plan, evaluation, report).link == link


def test_given_options_override_the_calibration():
    """A calibration of another kind of device is refused."""
    profile = random_profile(2, 8, sizes=(1, 2, 4))
    plan = plan_of(profile)
    evaluation = Evaluation.of(plan, profile)
    found = replace(calibration_of(plan, evaluation, report_of(plan, evaluation)), reserve_bytes=77)
    kind = {"devices": 3, "mem": "8GB", "batch": 8, "calibration": replace(found, device=profile.device)}
    assert request_of(profile, REFERENCE, SolverOptions(**kind)).inputs.reserve_bytes == 77
    options = SolverOptions(**kind, link="2GB/s", overhead="3us", reserve="5kB")
    asked = request_of(profile, REFERENCE, options).inputs
    assert (asked.link, asked.overhead_us, asked.reserve_bytes) == (Link(bytes_per_s=2e9), 3.0, 5000)
    other = replace(found, device=replace(profile.device, kind="tpu"))
    with pytest.raises(UsageError, match=r"the calibration is of tpu, the profile of"):
        request_of(profile, REFERENCE, SolverOptions(devices=3, mem="8GB", batch=8, calibration=other))


@pytest.mark.parametrize(
    ("compute", "peak", "agrees"), [(1.0, 1.0, True), (1.05, 1.009, True), (1.0, 0.96, True), (1.4, 1.0, False),
                                   (1.0, 1.02, False), (1.0, 0.9, False)]
)  # fmt: skip
def test_verification_agrees_within_its_tolerances(compute, peak, agrees):
    profile = random_profile(0, 8, sizes=(1, 2, 4))
    plan = plan_of(profile)
    evaluation = Evaluation.of(plan, profile)
    machine = slower(plan.inputs.cluster, compute=compute, overhead_us=20.0, link=1.0)
    report = report_of(plan, replace(evaluation, cluster=machine), peak_factor=peak)
    found = verification_of(plan, profile, report, TOLERANCE)
    assert found.agrees is agrees
    judged = {row.what for row in found.compared if row.agrees is not None}
    assert judged == {"step_us", "peak_bytes"}
    crowded = verification_of(plan, profile, report, TOLERANCE, reason_times_are_invalid="too few cores")
    assert crowded.agrees is (peak in (1.0, 1.009, 0.96))
    assert crowded.notes == ("too few cores",)
    waited = replace(report, stages=tuple(replace(run, core_share=0.4) for run in report.stages))
    disturbed = verification_of(plan, profile, waited, TOLERANCE)
    assert disturbed.agrees is crowded.agrees
    assert "a core for only 40% of the time" in disturbed.notes[0]


def test_peaks_within_the_slack_agree():
    """A few kilobytes are many percent of a tiny model."""
    allowed = Tolerance(step=0.1, memory_below=0.01, memory_above=0.05)
    assert allowed.allows_peak(predicted=3_000, measured=3_000 + 65_000)
    assert allowed.allows_peak(predicted=3_000 + 65_000, measured=3_000)
    assert not allowed.allows_peak(predicted=3_000, measured=3_000 + 67_000)
    assert not allowed.allows_peak(predicted=3_000 + 67_000, measured=3_000)
    assert not allowed.allows_peak(predicted=98 * 2**20, measured=100 * 2**20)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_measured_bubble_equals_the_predicted_one(schedule):
    profile = random_profile(4, 8, sizes=(1, 2, 4))
    plan = plan_of(profile, schedule=schedule)
    evaluation = Evaluation.of(plan, profile)
    found = verification_of(plan, profile, report_of(plan, evaluation), TOLERANCE)
    (bubble,) = (row for row in found.compared if row.what == "bubble")
    assert bubble.measured == pytest.approx(bubble.predicted, rel=0.02)


def test_verification_needs_steps_after_warm_up():
    profile = random_profile(0, 8, sizes=(1, 2, 4))
    plan = plan_of(profile)
    evaluation = Evaluation.of(plan, profile)
    report = report_of(plan, evaluation)
    with pytest.raises(MeasurementError, match="2 steps are all warm-up"):
        verification_of(plan, profile, replace(report, step_us=report.step_us[:2]), TOLERANCE)


def test_measured_bubble_of_a_v_equals_the_predicted_one():
    """At the turn of a V, a device sends nothing to itself."""
    profile = random_profile(4, 8, sizes=(1, 2, 4))
    inputs = replace(inputs_of(2, 8, link=LINK), schedule="zbv", chunks=2)
    plan = solve(profile, Request(inputs=inputs, balance=(2, 2, 2, 2), micro_batches=4))
    evaluation = Evaluation.of(plan, profile)
    run = report_of(plan, evaluation)
    assert run.bubble == pytest.approx(plan.predicted.bubble, rel=0.02)
    assert {boundary.index for boundary in run.boundaries} == {0, 2}
    for stage, measured in zip(plan.stages, run.stages, strict=True):
        assert measured.forward_us == pytest.approx(stage.forward_us, abs=0.1)
        assert measured.backward_us == pytest.approx(stage.backward_us, abs=0.1)
