"""A run of a plan judged against its prediction: are step time and memory what was predicted?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import median
from typing import Final, Literal

from planner.core.cost.evaluate import Evaluation
from planner.core.errors import MeasurementError
from planner.core.judge.calibration import calibration_of, peak_bytes_of, stage_runs, timed_steps_us
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
    """How far a prediction may be off, as shares unless it says otherwise."""

    step: float
    """A share of the predicted step time, in either direction."""
    memory_below: float
    """How far a predicted peak may lie below the measured one."""
    memory_above: float
    """How far above it."""
    memory_slack_bytes: int = SLACK_BYTES
    """In either direction, and beside the shares."""

    def allows_peak(self, *, predicted: float, measured: float) -> bool:
        """Whether a predicted peak is near enough to the measured one."""
        lowest = measured * (1 - self.memory_below) - self.memory_slack_bytes
        return lowest <= predicted <= measured * (1 + self.memory_above) + self.memory_slack_bytes


DEFAULT_TOLERANCE: Final = Tolerance(step=0.1, memory_below=0.01, memory_above=0.05)
"""What `verify` allows where nothing else is asked, and a run that looks at itself in the end."""


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
    again: str = ""
    """The command that plans with the calibration; empty where that is in no file."""


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
        crowded: Why times say nothing here, if that is known beside the report: they are not judged then.
        proof: What its stages computed, held against the model in one piece.
        wrong: What they did not compute as the model does.

    Raises:
        MeasurementError: The run was over before anything was measured.
    """
    if len(report.step_us) <= report.warmup_steps:
        raise MeasurementError(f"{len(report.step_us)} steps are all warm-up", hint="run more: `--steps 12`")
    crowded = crowded or disturbance(report)
    compared = tuple(judged(row, tolerance, are_times_judged=not crowded) for row in compared_of(plan, report))
    return Verification(
        agrees=all(row.agrees is not False for row in compared) and not wrong,
        compared=compared,
        tolerance=tolerance,
        notes=(*wrong, *([crowded] if crowded else [])),
        proof=proof,
        calibration=calibration_of(plan, Evaluation.of(plan, profile), report),
        run=report,
    )


def compared_of(plan: Plan, report: RunReport) -> tuple[Compared, ...]:
    """Predicted beside measured, not judged: the step, the bubble, times per stage, peak memory per device.

    Of replicas the slowest times and the highest peaks count. A run of other stages is compared as far as it goes.
    """
    stages = [[stage.index for stage in chunks] for chunks in plan.by_device()]
    peaks = peaks_of(list(zip(stages, peak_bytes_of(plan), strict=True)), report)
    return (*_times(plan, report), *peaks)


def crowding(processes: int, threads: int, cores: int) -> str:
    """Why the times of CPU processes on one machine would say nothing; empty if they do."""
    wanted = processes * threads
    if wanted <= cores:
        return ""
    return f"times are not judged: the plan's processes want {wanted} cores, and this machine has {cores}"


def disturbance(report: RunReport) -> str:
    """Why the times of a run say nothing, where its processes were kept waiting for a core; empty if they were not."""
    waited = lack_of_cores(report)
    return f"times are not judged: {waited}; end what runs beside it, and run it again" if waited else ""


def lack_of_cores(report: RunReport) -> str:
    """Say for how long a process of a run had a core, where that was too short for its times; else nothing."""
    share = min((run.core_share for run in report.stages if run.core_share), default=1.0)
    if share >= LEAST_CORE_SHARE:
        return ""
    return f"a process of the run had a core for only {share:.0%} of the time that it wanted one"


def other_samples(report: RunReport) -> float | None:
    """How many samples a step of the run had, if not about as many as planned; several mini-batches may be one."""
    rates = report.samples_per_s[report.warmup_steps :]
    if not report.batch or not rates:
        return None
    steps_s = [step_us / 1e6 for step_us in report.step_us[report.warmup_steps :]]
    # A smaller last mini-batch of an epoch does not move the median.
    samples = median(rate * step_s for rate, step_s in zip(rates, steps_s, strict=False))
    # Rates are written to a tenth, of which a step of a minute makes samples.
    return None if isclose(samples, report.batch, rel_tol=0.02, abs_tol=0.05 * median(steps_s)) else samples


def peaks_of(devices: Sequence[tuple[Sequence[int], int]], report: RunReport) -> Iterator[Compared]:
    """The highest peak of every device beside the predicted one.

    `devices` are those of a pipeline: the stages of each, and the peak in bytes that its allocator is predicted to see.
    """
    runs = {run.index: run for run in stage_runs(report)}
    for device, (stages, need) in enumerate(devices):
        # All chunks of a device share its allocator.
        peaks = [runs[stage].peak_bytes for stage in stages if stage in runs]
        if peaks:
            yield Compared(what="peak_bytes", index=device, predicted=need, measured=max(peaks))


def judged(row: Compared, tolerance: Tolerance, *, are_times_judged: bool) -> Compared:
    """A figure with its verdict, where it is one that is judged."""
    if row.what == "step_us" and are_times_judged:
        return replace(row, agrees=abs(row.measured - row.predicted) <= tolerance.step * row.predicted)
    if row.what == "peak_bytes":
        return replace(row, agrees=tolerance.allows_peak(predicted=row.predicted, measured=row.measured))
    return row


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
    if not any(stage.backward_weight_us and run.backward_weight_us for stage, run in pairs):
        return
    for stage, run in pairs:
        input_us = stage.backward_us - stage.backward_weight_us
        yield Compared(what="backward_input_us", index=stage.index, predicted=input_us, measured=run.backward_input_us)
    for stage, run in pairs:
        weight_us = stage.backward_weight_us
        yield Compared(
            what="backward_weight_us", index=stage.index, predicted=weight_us, measured=run.backward_weight_us
        )
