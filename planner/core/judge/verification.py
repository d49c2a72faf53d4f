"""A run of a plan judged against its prediction: are step time and memory what was predicted?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from planner.core.cost.calibration import Calibration, calibration_of, peak_bytes_of, stage_runs
from planner.core.cost.costs import costs_at
from planner.core.errors import MeasurementError
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.proof import Proof
from planner.core.values.run_report import RunReport

Quantity = Literal["step_us", "bubble", "forward_us", "backward_us", "peak_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a prediction may be off, as shares unless it says otherwise."""

    step: float
    """A share of the predicted step time, in either direction."""
    memory_below: float
    """How far a predicted peak may lie below the measured one."""
    memory_above: float
    """How far above it."""
    memory_slack_bytes: int = 64 * 2**10
    """In either direction, and beside the shares: of a stage of some kilobytes a number or two are percents."""

    def allows_peak(self, *, predicted: float, measured: float) -> bool:
        """Whether a predicted peak is near enough to the measured one."""
        lowest = measured * (1 - self.memory_below) - self.memory_slack_bytes
        return lowest <= predicted <= measured * (1 + self.memory_above) + self.memory_slack_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and measured."""

    what: Quantity
    index: int | None = None
    """The stage's number; for a peak the device's."""
    predicted: float
    measured: float
    agrees: bool | None = None
    """None where it is shown without being judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The answer."""

    schema: Literal["gpipe-plan/verify/v1"] = "gpipe-plan/verify/v1"
    agrees: bool
    """Whether everything that is judged is within its tolerance."""
    compared: tuple[Compared, ...]
    tolerance: Tolerance
    notes: tuple[str, ...]
    proof: Proof | None = None
    """What the plan's stages computed, held against the model in one piece."""
    calibration: Calibration
    run: RunReport


def verification_of(
    plan: Plan,
    profile: Profile,
    report: RunReport,
    tolerance: Tolerance,
    *,
    crowded: str = "",
    proof: Proof | None = None,
    wrong: Sequence[str] = (),
) -> Verification:
    """Sets a run beside what is predicted of it.

    Args:
        plan: As predicted now.
        profile: Its profile.
        report: Of a run under it.
        tolerance: How far it may be off.
        crowded: Why times say nothing here, if they do not: they are not judged then.
        proof: What its stages computed, held against the model in one piece.
        wrong: What they did not compute as the model does.

    Raises:
        MeasurementError: The run was over before anything was measured.
    """
    if len(report.step_us) <= report.warmup_steps:
        raise MeasurementError(f"{len(report.step_us)} steps are all warm-up", hint="run more: `--steps 12`")
    compared = tuple(_judged(row, tolerance, are_times_judged=not crowded) for row in compared_of(plan, report))
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    return Verification(
        agrees=all(row.agrees is not False for row in compared) and not wrong,
        compared=compared,
        tolerance=tolerance,
        notes=(*wrong, *([crowded] if crowded else [])),
        proof=proof,
        calibration=calibration_of(plan, costs, report),
        run=report,
    )


def compared_of(plan: Plan, report: RunReport) -> tuple[Compared, ...]:
    """Predicted beside measured, not judged: the step, the bubble, times per stage, peak memory per device.

    Of replicas the slowest times and the highest peaks count. A run of other stages is compared as far as it goes.
    """
    return (*_times(plan, report), *_peaks(plan, report))


def timed_steps_us(report: RunReport) -> tuple[float, ...]:
    """The steps that count; a run shorter than its warm-up has nothing better to offer than the warm-up."""
    return report.step_us[report.warmup_steps :] or report.step_us


def _times(plan: Plan, report: RunReport) -> Iterator[Compared]:
    predicted, steps_us = plan.predicted, timed_steps_us(report)
    yield Compared(what="step_us", predicted=predicted.step_us, measured=median(steps_us) if steps_us else 0.0)
    if report.bubble is not None:
        yield Compared(what="bubble", predicted=predicted.bubble, measured=report.bubble)
    pairs = list(zip(plan.stages, stage_runs(report), strict=False))
    for stage, run in pairs:
        yield Compared(what="forward_us", index=stage.index, predicted=stage.forward_us, measured=run.forward_us)
    for stage, run in pairs:
        yield Compared(what="backward_us", index=stage.index, predicted=stage.backward_us, measured=run.backward_us)


def _peaks(plan: Plan, report: RunReport) -> Iterator[Compared]:
    runs = {run.index: run for run in stage_runs(report)}
    for device, (chunks, need) in enumerate(zip(plan.by_device(), peak_bytes_of(plan), strict=True)):
        # All chunks of a device share its allocator.
        peaks = [runs[stage.index].peak_bytes for stage in chunks if stage.index in runs]
        if peaks:
            yield Compared(what="peak_bytes", index=device, predicted=need, measured=max(peaks))


def _judged(row: Compared, tolerance: Tolerance, *, are_times_judged: bool) -> Compared:
    if row.what == "step_us" and are_times_judged:
        return replace(row, agrees=abs(row.measured - row.predicted) <= tolerance.step * row.predicted)
    if row.what == "peak_bytes":
        return replace(row, agrees=tolerance.allows_peak(predicted=row.predicted, measured=row.measured))
    return row
