"""Comparison of a run with the predicted step time and memory of its plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import median
from typing import Final, Literal

from planner.core.cost.evaluate import Evaluation
from planner.core.errors import MeasurementError
from planner.core.judge.calibration import allocator_peaks, calibration_of, stage_runs, timed_steps_us
from planner.core.judge.certainty import SLACK_BYTES
from planner.core.values.calibration import Calibration
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.proof import Proof
from planner.core.values.run_report import LEAST_CORE_SHARE, RunReport

Quantity = Literal[
    "step_us", "bubble", "forward_us", "backward_us", "backward_input_us", "backward_weight_us", "peak_bytes"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Allowed errors of predictions, relative unless stated otherwise."""

    step: float
    """Error of the step time, in either direction, as a share of the prediction."""
    memory_below: float
    """Share of the measured peak by which the predicted peak may be smaller."""
    memory_above: float
    """Share of the measured peak by which the predicted peak may be larger."""
    memory_slack_bytes: int = SLACK_BYTES
    """Bytes by which a predicted peak may be smaller or larger, in addition to `memory_below` and `memory_above`."""

    def allows_peak(self, *, predicted: float, measured: float) -> bool:
        """Return True if a predicted peak is within the tolerance of the measured one, both in bytes."""
        lowest = measured * (1 - self.memory_below) - self.memory_slack_bytes
        return lowest <= predicted <= measured * (1 + self.memory_above) + self.memory_slack_bytes


DEFAULT_TOLERANCE: Final = Tolerance(step=0.1, memory_below=0.01, memory_above=0.05)
"""Default of `verify`, and tolerance of the comparison at the end of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """Predicted and measured value of one figure, such as the step time."""

    what: Quantity
    index: int | None = None
    """Index of the stage; for a peak, index of the device."""
    predicted: float
    measured: float
    agrees: bool | None = None
    """True if the values agree within the tolerance; None if they are not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of the comparison of a run with its plan."""

    schema: Literal["gpipe-plan/verify/v1"] = "gpipe-plan/verify/v1"
    agrees: bool
    """True if every judged value is within its tolerance."""
    compared: tuple[ComparedFigure, ...]
    tolerance: Tolerance
    notes: tuple[str, ...]
    proof: Proof | None = None
    """Result of the equivalence check of the stages with the unpartitioned model."""
    calibration: Calibration
    """Costs of the machine, measured by the run."""
    run: RunReport
    again: str = ""
    """`gpipe-plan solve` command that makes a new plan with `calibration`; empty if `calibration` was not written."""


def verification_of(
    plan: Plan,
    profile: Profile,
    report: RunReport,
    tolerance: Tolerance,
    *,
    reason_times_are_invalid: str = "",
    proof: Proof | None = None,
    wrong: Sequence[str] = (),
) -> Verification:
    """Compare the measurements of a run with the predictions of its plan.

    Args:
        plan: Plan, with predictions that the installed version of the planner has computed again.
        profile: Profile of the plan.
        report: Report of a run of the plan.
        tolerance: Allowed errors.
        reason_times_are_invalid: Reason not to judge times, such as too few CPU cores; empty if there is none.
        proof: Result of the equivalence check of the stages with the unpartitioned model.
        wrong: Differences that the equivalence check found.

    Returns:
        Compared values with their verdicts, and the calibration: the costs that the run measured.

    Raises:
        MeasurementError: The run was no longer than its warm-up.
    """
    if len(report.step_us) <= report.warmup_steps:
        raise MeasurementError(f"{len(report.step_us)} steps are all warm-up steps", hint="run more: `--steps 12`")
    reason = reason_times_are_invalid or disturbance_reason(report)
    compared = tuple(
        with_agreement(row, tolerance, are_times_judged=not reason) for row in compared_figures(plan, report)
    )
    return Verification(
        agrees=all(row.agrees is not False for row in compared) and not wrong,
        compared=compared,
        tolerance=tolerance,
        notes=(*wrong, *([reason] if reason else [])),
        proof=proof,
        calibration=calibration_of(plan, Evaluation.of(plan, profile), report),
        run=report,
    )


def compared_figures(plan: Plan, report: RunReport) -> tuple[ComparedFigure, ...]:
    """Return predicted and measured values: step time, bubble, times of each stage, peak of each device.

    The values have no verdict yet (`agrees` is None). With several replicas, the slowest times and the highest peaks
    are used. Stages that are not in the report are left out.
    """
    stages = [[stage.index for stage in chunks] for chunks in plan.by_device()]
    peaks = compared_peaks(list(zip(stages, allocator_peaks(plan), strict=True)), report)
    return (*_times(plan, report), *peaks)


def core_shortage_reason(processes: int, threads: int, cores: int) -> str:
    """Return a message that times are not judged because the machine has too few CPU cores; "" if it has enough.

    Args:
        processes: Number of processes on the machine.
        threads: Threads per process.
        cores: CPU cores of the machine.
    """
    wanted = processes * threads
    if wanted <= cores:
        return ""
    return f"times are not judged: the plan's processes need {wanted} cores, and this machine has {cores}"


def disturbance_reason(report: RunReport) -> str:
    """Return a message that times are not judged because processes waited for CPU cores; "" if none waited long."""
    waited = cpu_time_phrase(report)
    return f"times are not judged: {waited}; end other programs, and run it again" if waited else ""


def cpu_time_phrase(report: RunReport) -> str:
    """Return a phrase about the smallest CPU share of a process; "" if this share is at least `LEAST_CORE_SHARE`."""
    share = min((run.core_share for run in report.stages if run.core_share), default=1.0)
    if share >= LEAST_CORE_SHARE:
        return ""
    return f"a process of the run had a core for only {share:.0%} of the time that it needed one"


def samples_per_step_if_unplanned(report: RunReport) -> float | None:
    """Return a run's median number of samples per step if it differs from the plan; None if equal or unknown."""
    rates = report.samples_per_s[report.warmup_steps :]
    if not report.batch or not rates:
        return None
    steps_s = [step_us / 1e6 for step_us in report.step_us[report.warmup_steps :]]
    # The median ignores a smaller last mini-batch of an epoch.
    samples = median(rate * step_s for rate, step_s in zip(rates, steps_s, strict=False))
    # Rates are rounded to 0.1 samples/s, which are 3 samples in a step of a minute.
    return None if isclose(samples, report.batch, rel_tol=0.02, abs_tol=0.05 * median(steps_s)) else samples


def compared_peaks(devices: Sequence[tuple[Sequence[int], int]], report: RunReport) -> Iterator[ComparedFigure]:
    """Yield the highest measured peak and the predicted peak of every device, in bytes.

    `devices` has the stages and the predicted allocator peak of each device of a pipeline.
    """
    runs = {run.index: run for run in stage_runs(report)}
    for device, (stages, need) in enumerate(devices):
        # All chunks of a device share its allocator.
        peaks = [runs[stage].peak_bytes for stage in stages if stage in runs]
        if peaks:
            yield ComparedFigure(what="peak_bytes", index=device, predicted=need, measured=max(peaks))


def with_agreement(row: ComparedFigure, tolerance: Tolerance, *, are_times_judged: bool) -> ComparedFigure:
    """Return a figure with its verdict: for a step time or a peak, `agrees` is True if it is within the tolerance.

    Args:
        row: Compared figure.
        tolerance: Allowed errors.
        are_times_judged: False to leave the step time without a verdict.
    """
    if row.what == "step_us" and are_times_judged:
        return replace(row, agrees=abs(row.measured - row.predicted) <= tolerance.step * row.predicted)
    if row.what == "peak_bytes":
        return replace(row, agrees=tolerance.allows_peak(predicted=row.predicted, measured=row.measured))
    return row


def _times(plan: Plan, report: RunReport) -> Iterator[ComparedFigure]:
    predicted, steps_us = plan.predicted, timed_steps_us(report)
    yield ComparedFigure(what="step_us", predicted=predicted.step_us, measured=median(steps_us) if steps_us else 0.0)
    if report.bubble is not None:
        yield ComparedFigure(what="bubble", predicted=predicted.bubble, measured=report.bubble)
    pairs = list(zip(plan.stages, stage_runs(report), strict=False))
    whole: tuple[Quantity, ...] = ("forward_us", "backward_us")
    split: tuple[Quantity, ...] = ("backward_input_us", "backward_weight_us")
    are_split = any(stage.backward_weight_us and run.backward_weight_us for stage, run in pairs)
    for what in (*whole, *split) if are_split else whole:
        for stage, run in pairs:
            predicted_us, measured_us = getattr(stage, what), getattr(run, what)
            yield ComparedFigure(what=what, index=stage.index, predicted=predicted_us, measured=measured_us)
