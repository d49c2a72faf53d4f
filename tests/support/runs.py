"""Reports of runs that were never made, with the times of the simulator."""

from dataclasses import replace

from planner.core.cost.evaluate import Evaluation
from planner.core.schedule import KINDS
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Plan
from planner.core.values.profile import Device
from planner.core.values.run_report import RunReport, StageRun
from planner.executor.measure.run_times import ProcessRun, RunSpan, RunStep, typical_action_us, with_waits

STEPS = 5
_WARM_UP = 2


def runs_of(evaluation: Evaluation) -> list[ProcessRun]:
    """Return the record of every process; the engine's own time precedes each forward and backward."""
    partition, times = evaluation.partition, evaluation.stage_times
    overhead_ns = round(evaluation.cluster.overhead_us * 1000)
    spans: dict[int, list[RunSpan]] = {device: [] for device in range(partition.num_devices)}
    for event in evaluation.events:
        if event.kind not in KINDS:
            continue
        start, end = round(event.start_us * 1000) + overhead_ns, round(event.end_us * 1000)
        kind = KINDS[event.kind].label
        spans[event.device].append(RunSpan(kind, event.stage, event.micro_batch, start, end))
        last = event.micro_batch == partition.micro_batches - 1
        again = times[event.stage].last_recompute_us if last else times[event.stage].recompute_us
        if KINDS[event.kind].direction < 0 and again > 0:
            middle = start + round(again * 1000)
            spans[event.device].append(RunSpan("recompute", event.stage, event.micro_batch, start, middle))
    return [ProcessRun(rank, 0, tuple(RunStep(n, tuple(done)) for n in range(STEPS))) for rank, done in spans.items()]


def report_of(plan: Plan, evaluation: Evaluation, *, peak_factor: float = 1.0) -> RunReport:
    """Return the report of a run of `plan` on the cluster of `evaluation`."""
    runs = runs_of(evaluation)
    steps = [step.spans for run in runs for step in run.steps]
    stages = [
        StageRun(
            index=stage.index,
            first=stage.first,
            last=stage.last,
            forward_us=typical_action_us(steps, "forward", stage.index),
            backward_us=typical_action_us(steps, "backward", stage.index),
            parameter_bytes=stage.memory.parameters,
            peak_bytes=round((stage.memory.total - stage.memory.reserve) * peak_factor),
        )
        for stage in plan.stages
    ]
    taken = evaluation.step_us
    report = RunReport(
        plan_digest="sha256:1",
        seed=0,
        device=Device(kind="cpu", name="made up"),
        losses=(1.0,) * STEPS,
        step_us=(10 * taken,) * _WARM_UP + (taken,) * (STEPS - _WARM_UP),
        batch=plan.inputs.batch,
        warmup_steps=_WARM_UP,
        stages=tuple(stages),
    )
    return with_waits(report, runs, overlaps=not evaluation.cluster.link.blocking)


def slower(cluster: Cluster, *, compute: float, overhead_us: float, link: float) -> Cluster:
    """Return the cluster with these factors."""
    rate = cluster.link.bytes_per_s / link
    slow = replace(cluster.link, latency_us=cluster.link.latency_us * link, bytes_per_s=rate)
    return replace(cluster, compute=compute, overhead_us=overhead_us, link=slow)
