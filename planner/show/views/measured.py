"""Measurements of a run, and their comparison with the plan, as tables and texts."""

from collections.abc import Mapping
from operator import attrgetter

from planner.core.judge.calibration import stage_runs
from planner.core.judge.verification import ComparedFigure, Quantity, cpu_time_phrase
from planner.core.values.plan import Plan
from planner.core.values.run_report import RunReport, StageRun
from planner.core.values.units import pluralize
from planner.show.views.numbers import NOTHING, layer_range, percent_difference
from planner.show.views.table import Table, column, table

HEADERS = ("predicted", "measured", "difference")
OF_REPLICAS = "the slowest and the largest of the replicas"
"""Description of the measured times and peaks of a run with replicas: the largest value of any replica is shown."""

WAITING = ("recompute", "transfer", "idle")
"""Names of columns that are left out of a run's table if all their values are 0."""

_LABELS: Mapping[Quantity, str] = {
    "step_us": "step",
    "bubble": "bubble",
    "forward_us": "forward, stage",
    "backward_us": "backward, stage",
    "backward_input_us": "input backward, stage",
    "backward_weight_us": "weight backward, stage",
    "peak_bytes": "peak memory,",
}


def figure_label(row: ComparedFigure, place: str) -> str:
    """Return the label of a compared figure, such as `forward, stage 2`.

    The label of a memory peak has `place`, which is `stage` or `device`, before the index.
    """
    label = _LABELS[row.what] + (f" {place}" if row.what == "peak_bytes" else "")
    return label if row.index is None else f"{label} {row.index}"


def difference_words(row: ComparedFigure) -> str:
    """Return the relative difference between measured and predicted value in percent; `-` if nothing was measured."""
    return percent_difference(row.predicted, row.measured) if row.measured else NOTHING


def is_over(row: ComparedFigure, plan: Plan) -> bool:
    """Return True if a measured peak exceeds the device's memory limit minus its reserve."""
    if row.what != "peak_bytes" or row.index is None:
        return False
    chunks = plan.chunks_of(row.index)
    # The reserve covers memory outside the device's allocator, which the report does not measure.
    return row.measured > chunks[0].memory_bytes - sum(stage.memory.reserve for stage in chunks)


def ran_other_stages(plan: Plan, report: RunReport) -> bool:
    """Return True if the run had other cuts than the plan."""
    cuts = [[(stage.first, stage.last) for stage in stages] for stages in (plan.stages, stage_runs(report))]
    return cuts[0] != cuts[1]


def pipeline_words(report: RunReport, plan: Plan | None = None) -> str:
    """Return a run's numbers of stages, devices and replicas as text, such as `8 stages on 4 devices in 2 replicas`.

    Devices are left out if each has one stage, replicas if there is only one.
    """
    replicas = len({stage.replica for stage in report.stages})
    stages = pluralize(len(report.stages) // max(1, replicas), "stage")
    if plan is not None and has_only_device_peaks(plan, report):
        stages += f" on {plan.num_devices} devices"
    return f"{stages} in {replicas} replicas" if replicas > 1 else stages


def has_only_device_peaks(plan: Plan, report: RunReport) -> bool:
    """Return True if several stages shared a device, so that only the peak of the device was measured."""
    return plan.chunks > 1 and not ran_other_stages(plan, report)


OF_DEVICES = "peak memory is that of the whole device, equal for all stages on it"


def times_warning(report: RunReport) -> str:
    """Return a warning if a run's processes got too little CPU time; else an empty text."""
    waited = cpu_time_phrase(report)
    return f"times are too long: {waited}, because there were more processes than free cores" if waited else ""


def run_table(report: RunReport) -> Table:
    """Return a table of a run with a row per stage and replica.

    Transfer and idle times are per step, other times per micro-batch.
    """
    split_backward = (
        column("input_backward", "input\nbackward", attrgetter("backward_input_us"), "us", per="micro-batch"),
        column("weight_backward", "weight\nbackward", attrgetter("backward_weight_us"), "us", per="micro-batch"),
    )
    return table(
        report.stages,
        column("stage", "stage", _stage),
        column("layers", "layers", lambda run: layer_range(run.first, run.last)),
        column("forward", "forward", attrgetter("forward_us"), "us", per="micro-batch"),
        column("backward", "backward", attrgetter("backward_us"), "us", per="micro-batch"),
        *(split_backward if any(run.backward_weight_us for run in report.stages) else ()),
        column("recompute", "recomp.", attrgetter("recompute_us"), "us", per="micro-batch"),
        column("transfer", "transfer", attrgetter("transfer_us"), "us", per="step"),
        column("idle", "idle", attrgetter("idle_us"), "us", per="step"),
        column("parameters", "parameters", attrgetter("parameter_bytes"), "bytes"),
        column("peak", "peak\nmemory", attrgetter("peak_bytes"), "bytes"),
    )


def _stage(run: StageRun) -> str:
    return f"{run.index}, replica {run.replica}" if run.replica else str(run.index)
