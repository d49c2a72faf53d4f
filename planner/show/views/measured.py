"""What a run took, stage by stage, and beside it what its plan predicted: rows that terminal and report both draw."""

from collections.abc import Mapping
from operator import attrgetter

from planner.core.judge.calibration import stage_runs
from planner.core.judge.verification import Compared, Quantity, lack_of_cores
from planner.core.values.plan import Plan
from planner.core.values.run_report import RunReport, StageRun
from planner.core.values.units import counted
from planner.show.views.numbers import NOTHING, difference, layer_range
from planner.show.views.table import Table, column, table

HEADERS = ("predicted", "measured", "difference")
OF_REPLICAS = "the slowest and the largest of the replicas"
"""Which of the measured figures stand beside those that are predicted of one pipeline."""

WAITING = ("recompute", "transfer", "idle")
"""Columns that some runs have nothing in."""

_LABELS: Mapping[Quantity, str] = {
    "step_us": "step",
    "bubble": "bubble",
    "forward_us": "forward, stage",
    "backward_us": "backward, stage",
    "backward_input_us": "input backward, stage",
    "backward_weight_us": "weight backward, stage",
    "peak_bytes": "peak memory,",
}


def label_of(row: Compared, place: str) -> str:
    """What a figure is called; `place` is the word for where peaks are."""
    label = _LABELS[row.what] + (f" {place}" if row.what == "peak_bytes" else "")
    return label if row.index is None else f"{label} {row.index}"


def off_by(row: Compared) -> str:
    """How far the measured figure lies off the predicted one, where something was measured."""
    return difference(row.predicted, row.measured) if row.measured else NOTHING


def is_over(row: Compared, plan: Plan) -> bool:
    """Whether it is a measured peak above what the cap leaves beside the reserve."""
    if row.what != "peak_bytes" or row.index is None:
        return False
    chunks = plan.chunks_of(row.index)
    # The reserve is for what the device's allocator does not see, so the report does not hold it either.
    return row.measured > chunks[0].memory_bytes - sum(stage.memory.reserve for stage in chunks)


def ran_other_stages(plan: Plan, report: RunReport) -> bool:
    """Whether the run cut the chain elsewhere, so that stages of one number are not of the same layers."""
    cuts = [[(stage.first, stage.last) for stage in stages] for stages in (plan.stages, stage_runs(report))]
    return cuts[0] != cuts[1]


def pipeline_words(report: RunReport, plan: Plan | None = None) -> str:
    """Return the number of stages of a run, of devices if its plan puts several on one, and of replicas."""
    replicas = len({stage.replica for stage in report.stages})
    stages = counted(len(report.stages) // max(1, replicas), "stage")
    if plan is not None and shares_peaks(plan, report):
        stages += f" on {plan.num_devices} devices"
    return f"{stages} in {replicas} replicas" if replicas > 1 else stages


def shares_peaks(plan: Plan, report: RunReport) -> bool:
    """Return True if stages of the run shared a device, and so have one peak."""
    return plan.chunks > 1 and not ran_other_stages(plan, report)


OF_DEVICES = "peak memory: of the whole device, and so equal for all stages on it"


def times_warning(report: RunReport) -> str:
    """Return a warning where the processes of a run had too little of the cores for its times to say much."""
    waited = lack_of_cores(report)
    return f"times are too long: {waited}, as more processes ran than there were free cores" if waited else ""


def run_table(report: RunReport) -> Table:
    """A row per stage of every replica; times of one micro-batch, transfer and idle time of a whole step."""
    halves = (
        column("input_backward", "input\nbackward", attrgetter("backward_input_us"), "us", per="micro-batch"),
        column("weight_backward", "weight\nbackward", attrgetter("backward_weight_us"), "us", per="micro-batch"),
    )
    return table(
        report.stages,
        column("stage", "stage", _stage),
        column("layers", "layers", lambda run: layer_range(run.first, run.last)),
        column("forward", "forward", attrgetter("forward_us"), "us", per="micro-batch"),
        column("backward", "backward", attrgetter("backward_us"), "us", per="micro-batch"),
        *(halves if any(run.backward_weight_us for run in report.stages) else ()),
        column("recompute", "recomp.", attrgetter("recompute_us"), "us", per="micro-batch"),
        column("transfer", "transfer", attrgetter("transfer_us"), "us", per="step"),
        column("idle", "idle", attrgetter("idle_us"), "us", per="step"),
        column("parameters", "parameters", attrgetter("parameter_bytes"), "bytes"),
        column("peak", "peak\nmemory", attrgetter("peak_bytes"), "bytes"),
    )


def _stage(run: StageRun) -> str:
    return f"{run.index}, replica {run.replica}" if run.replica else str(run.index)
