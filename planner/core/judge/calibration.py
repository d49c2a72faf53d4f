"""What a run of a plan says of the machine that the profile could not: measured side by side with its neighbours."""

from dataclasses import replace

from planner.core.cost.evaluate import Evaluation
from planner.core.errors import UsageError
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.plan import Plan
from planner.core.values.profile import GENERATOR
from planner.core.values.run_report import BoundaryRun, RunReport, StageRun


def calibration_of(plan: Plan, evaluation: Evaluation, report: RunReport) -> Calibration:
    """What a run of `plan` measured, as corrections of what it was predicted with.

    Args:
        plan: As predicted now.
        evaluation: Of the plan, on its profile.
        report: Of a run under it.
    """
    overhead_us = plan.inputs.overhead_us if report.overhead_us is None else report.overhead_us
    corrected = Calibration(
        generator=GENERATOR,
        plan_digest=report.plan_digest,
        steps=max(0, len(report.step_us) - report.warmup_steps),
        device=replace(report.device, memory_bytes=0, executor=None),
        environment=report.environment,
        compute=round(_compute(plan, report), 4),
        overhead_us=overhead_us,
        link=_link(evaluation, report, overhead_us),
        reserve_bytes=_reserve(plan, report),
    )
    return replace(corrected, step_ratio=_step_ratio(evaluation, report, corrected))


def calibrated_executor(found: Calibration, kind: str, known: ExecutorCost | None = None) -> ExecutorCost:
    """What the executor costs on a device of this kind; of `known` the link, where none was calibrated.

    Raises:
        UsageError: The calibration is of another kind of device.
    """
    if found.device.kind != kind:
        raise UsageError(
            f"the calibration is of {found.device.kind}, the profile of {kind}",
            hint="calibrate where the plan will run: `gpipe-plan verify`",
        )
    return ExecutorCost(overhead_us=found.overhead_us, link=found.link or (known.link if known else Link()))


def stage_runs(report: RunReport) -> tuple[StageRun, ...]:
    """The stages of a pipeline: of several side by side the slowest times and the highest peaks."""
    runs: dict[int, StageRun] = {}
    for run in report.stages:
        known = runs.get(run.index, run)
        runs[run.index] = replace(
            run,
            replica=0,
            forward_us=max(known.forward_us, run.forward_us),
            backward_us=max(known.backward_us, run.backward_us),
            backward_input_us=max(known.backward_input_us, run.backward_input_us),
            backward_weight_us=max(known.backward_weight_us, run.backward_weight_us),
            peak_bytes=max(known.peak_bytes, run.peak_bytes),
            outside_bytes=max(known.outside_bytes, run.outside_bytes),
            core_share=min(known.core_share, run.core_share),
        )
    return tuple(runs[index] for index in sorted(runs))


def timed_steps_us(report: RunReport) -> tuple[float, ...]:
    """The steps that count; a run shorter than its warm-up has nothing better to offer than the warm-up."""
    return report.step_us[report.warmup_steps :] or report.step_us


def peak_bytes_of(plan: Plan) -> tuple[int, ...]:
    """Predicted peak of every device, as its allocator sees it: the reserve is for what that does not see."""
    return tuple(need - plan.inputs.reserve_bytes for need in plan.device_bytes())


def _compute(plan: Plan, report: RunReport) -> float:
    """Measured over profiled time of the stages' forwards and backwards."""
    measured = sum(run.forward_us + run.backward_us for run in stage_runs(report))
    overhead_us = 2 * plan.inputs.overhead_us * len(plan.stages)
    predicted = sum(stage.forward_us + stage.backward_us for stage in plan.stages) - overhead_us
    # What the plan was predicted with already is part of the answer.
    return plan.inputs.compute * measured / predicted if measured > 0 < predicted else plan.inputs.compute


def _step_ratio(evaluation: Evaluation, report: RunReport, corrected: Calibration) -> float | None:
    """What the corrections leave over: the step that was measured over the one that they predict."""
    from statistics import median  # noqa: PLC0415 - dear to import, and `solve` measures nothing

    steps_us = timed_steps_us(report)
    cluster = replace(
        evaluation.cluster,
        compute=corrected.compute,
        overhead_us=corrected.overhead_us,
        link=corrected.link or evaluation.cluster.link,
    )
    predicted_us = Evaluation(evaluation.costs, evaluation.partition, cluster).step_us
    return round(median(steps_us) / predicted_us, 4) if steps_us and predicted_us > 0 else None


def _link(evaluation: Evaluation, report: RunReport, overhead_us: float) -> Link | None:
    """The link that the plan counted on, slower or faster by one factor; all sizes that were sent tell of it."""
    cluster = evaluation.cluster
    if not report.boundaries or cluster.links or cluster.inter_link is not None:
        return None
    # A receiver cannot tell the engine's own time from the transfer.
    times_us = [max(0.0, time - overhead_us) for boundary in report.boundaries for time in _both(boundary)]
    if not times_us:
        return None
    predicted_us = [_predicted_us(evaluation, b.index) for b in report.boundaries for _ in _both(b)]
    blocking = cluster.link.blocking or report.device.kind == "cpu"
    if sum(predicted_us) <= 0:
        return Link(latency_us=round(sum(times_us) / len(times_us), 1), blocking=blocking)
    factor = sum(times_us) / sum(predicted_us)
    rate = cluster.link.bytes_per_s / factor if factor > 0 else 0.0
    latency_us = round(cluster.link.latency_us * factor, 1)
    return Link(latency_us=latency_us, bytes_per_s=float(f"{rate:.4g}"), blocking=blocking)


def _both(boundary: BoundaryRun) -> tuple[float, ...]:
    """Times of both directions; a direction in which nothing was seen is left out."""
    return tuple(time for time in (boundary.forward_us, boundary.backward_us) if time > 0)


def _predicted_us(evaluation: Evaluation, boundary: int) -> float:
    end = evaluation.partition.intervals()[boundary][1]
    return evaluation.cluster.link.transfer_us(float(evaluation.costs.boundaries.output[end - 1]))


def _reserve(plan: Plan, report: RunReport) -> int:
    """The most that any device had in use beyond the peak that is predicted for its allocator."""
    used = {run.index: run.peak_bytes + run.outside_bytes for run in stage_runs(report)}
    measured = [max(used.get(stage.index, 0) for stage in chunks) for chunks in plan.by_device()]
    return max(0, *(has - need for has, need in zip(measured, peak_bytes_of(plan), strict=True)))
