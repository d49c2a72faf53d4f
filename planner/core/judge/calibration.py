"""Corrections of a profile, computed from a measured run."""

from dataclasses import replace
from typing import Final

from planner.core.cost.evaluate import Evaluation
from planner.core.errors import UsageError
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.plan import Plan
from planner.core.values.profile import THIS_TOOL
from planner.core.values.run_report import BoundaryRun, RunReport, StageRun


def calibration_of(plan: Plan, evaluation: Evaluation, report: RunReport) -> Calibration:
    """Return the costs that a run of a plan has measured. Predictions can use them instead of the profile's costs.

    Args:
        plan: Plan, with predictions that the installed version of the planner has computed again.
        evaluation: Evaluation of the plan on its profile.
        report: Report of a run of the plan.
    """
    overhead_us = plan.inputs.overhead_us if report.overhead_us is None else report.overhead_us
    corrected = Calibration(
        generator=THIS_TOOL,
        plan_digest=report.plan_digest,
        steps=max(0, len(report.step_us) - report.warmup_steps),
        device=replace(report.device, memory_bytes=0, executor=None),
        environment=report.environment,
        compute=round(_compute_ratio(plan, report), 4),
        overhead_us=overhead_us,
        link=_measured_link(evaluation, report, overhead_us),
        reserve_bytes=_measured_reserve(plan, report),
    )
    return replace(corrected, step_ratio=_step_ratio(evaluation, report, corrected))


def calibrated_executor(calibration: Calibration, kind: str, measured: ExecutorCost | None = None) -> ExecutorCost:
    """Return the executor's overhead and link from a calibration.

    Args:
        calibration: Calibration from a run.
        kind: Kind of the profiled device; must be equal to that of the calibration.
        measured: Executor costs in the profile; their link is returned if the calibration has no link.

    Raises:
        UsageError: The calibration was measured on another kind of device.
    """
    if calibration.device.kind != kind:
        raise UsageError(
            f"the calibration is of {calibration.device.kind}, the profile of {kind}",
            hint="calibrate where the plan will run: `gpipe-plan verify`",
        )
    link = calibration.link or (measured.link if measured else Link())
    return ExecutorCost(overhead_us=calibration.overhead_us, link=link)


_LARGEST: Final = (
    *("forward_us", "backward_us", "backward_input_us", "backward_weight_us"),
    *("peak_bytes", "outside_bytes"),
)
"""Measurements of a stage for which the largest value of all replicas counts."""


def stage_runs(report: RunReport) -> tuple[StageRun, ...]:
    """Return the measurements of each stage: the slowest times and highest peaks over all replicas."""
    runs: dict[int, StageRun] = {}
    for run in report.stages:
        previous = runs.get(run.index, run)
        largest = {name: max(getattr(previous, name), getattr(run, name)) for name in _LARGEST}
        runs[run.index] = replace(run, replica=0, core_share=min(previous.core_share, run.core_share), **largest)
    return tuple(runs[index] for index in sorted(runs))


def timed_steps_us(report: RunReport) -> tuple[float, ...]:
    """Return a run's step times after the warm-up, in microseconds; all of them if there are only warm-up steps."""
    return report.step_us[report.warmup_steps :] or report.step_us


def allocator_peaks(plan: Plan) -> tuple[int, ...]:
    """Return the predicted peak memory of every device in bytes, without the plan's `reserve_bytes`.

    The reserve is memory for context, libraries and allocator slack.
    """
    return tuple(need - plan.inputs.reserve_bytes for need in plan.peak_bytes_by_device())


def _compute_ratio(plan: Plan, report: RunReport) -> float:
    measured = sum(run.forward_us + run.backward_us for run in stage_runs(report))
    overhead_us = 2 * plan.inputs.overhead_us * len(plan.stages)
    predicted = sum(stage.forward_us + stage.backward_us for stage in plan.stages) - overhead_us
    # The plan's times already include its own factor.
    return plan.inputs.compute * measured / predicted if measured > 0 < predicted else plan.inputs.compute


def _step_ratio(evaluation: Evaluation, report: RunReport, corrected: Calibration) -> float | None:
    from statistics import median  # noqa: PLC0415 - slow to import, and `solve` does not need it

    steps_us = timed_steps_us(report)
    cluster = replace(
        evaluation.cluster,
        compute=corrected.compute,
        overhead_us=corrected.overhead_us,
        link=corrected.link or evaluation.cluster.link,
    )
    predicted_us = Evaluation(evaluation.costs, evaluation.partition, cluster).step_us
    return round(median(steps_us) / predicted_us, 4) if steps_us and predicted_us > 0 else None


def _measured_link(evaluation: Evaluation, report: RunReport, overhead_us: float) -> Link | None:
    cluster = evaluation.cluster
    if not report.boundaries or cluster.links or cluster.inter_link is not None:
        return None
    # Measured transfer times include the executor's overhead.
    times_us = [max(0.0, time - overhead_us) for boundary in report.boundaries for time in _transfer_times_us(boundary)]
    if not times_us:
        return None
    predicted_us = [_predicted_us(evaluation, b.index) for b in report.boundaries for _ in _transfer_times_us(b)]
    blocking = cluster.link.blocking or report.device.kind == "cpu"
    if sum(predicted_us) <= 0:
        return Link(latency_us=round(sum(times_us) / len(times_us), 1), blocking=blocking)
    # One factor scales the latency and 1 / bandwidth of the plan's link.
    factor = sum(times_us) / sum(predicted_us)
    rate = cluster.link.bytes_per_s / factor if factor > 0 else 0.0
    latency_us = round(cluster.link.latency_us * factor, 1)
    return Link(latency_us=latency_us, bytes_per_s=float(f"{rate:.4g}"), blocking=blocking)


def _transfer_times_us(boundary: BoundaryRun) -> tuple[float, ...]:
    return tuple(time for time in (boundary.forward_us, boundary.backward_us) if time > 0)


def _predicted_us(evaluation: Evaluation, boundary: int) -> float:
    end = evaluation.partition.intervals()[boundary][1]
    return evaluation.cluster.link.transfer_us(float(evaluation.costs.boundaries.output[end - 1]))


def _measured_reserve(plan: Plan, report: RunReport) -> int:
    used = {run.index: run.peak_bytes + run.outside_bytes for run in stage_runs(report)}
    measured = [max(used.get(stage.index, 0) for stage in chunks) for chunks in plan.by_device()]
    return max(0, *(has - need for has, need in zip(measured, allocator_peaks(plan), strict=True)))
