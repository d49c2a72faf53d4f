"""Tables that compare plans, and that list the plans of a sweep."""

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from planner.core.judge.difference import ComparedPlan, Comparison, Difference
from planner.core.schedule import schedule_of
from planner.core.values.plan import Plan
from planner.core.values.sweep import Sweep, SweepCell
from planner.core.values.units import exact_bytes_option, format_bytes, pluralize
from planner.show.views.cluster import run_words
from planner.show.views.numbers import NOTHING, percent, percent_difference, rate_text
from planner.show.views.plan import gpu_noun
from planner.show.views.table import Table, Value, column, table


def comparison_table(comparison: Comparison) -> Table:
    """Return a table of plans, with their speed relative to the first plan. `OVER` marks exceeded memory limits."""
    first = comparison.plans[0]
    groups = any(row.plan.tensor_parallel > 1 for row in comparison.plans)
    width = [column("tensor_parallel", "GPUs per\nstage", attrgetter("plan.tensor_parallel"), "count", drop=7)]
    return table(
        comparison.plans,
        column("plan", "plan", attrgetter("path")),
        column("schedule", "schedule", lambda row: schedule_of(row.plan.schedule).title, drop=2),
        column("devices", "GPUs" if groups else "devices", attrgetter("plan.num_gpus"), "count"),
        *(width if groups else ()),
        column("size", "M x b", lambda row: f"{row.plan.micro_batches} x {row.plan.micro_batch_size}", "count", drop=3),
        column("step", "step", attrgetter("plan.predicted.step_us"), "us", drop=1),
        column("samples", "samples/s", _per_s, "rate"),
        column("per_device", "per\ndevice", lambda row: _per_s(row) / row.plan.num_gpus, "rate", drop=5),
        column("bubble", "bubble", attrgetter("plan.predicted.bubble"), "percent", drop=4),
        column("peak", "peak", lambda row: max(row.plan.peak_bytes_by_device()), "bytes"),
        column("limit", "limit", lambda row: min(stage.memory_bytes for stage in row.plan.stages), "bytes", drop=6),
        column("against", "speed vs\nfirst", lambda row: _against(row, first), "percent"),
    )


def comparison_notes(comparison: Comparison) -> list[str]:
    """Return notes on plans whose figures were not computed again, and on plans of different models."""
    stored = [row.path for row in comparison.plans if not row.recomputed]
    notes = [f"numbers are as stored, because the profile is missing: {', '.join(stored)}"] if stored else []
    if len({row.plan.inputs.model_digest for row in comparison.plans}) > 1:
        notes.append("the plans are not of the same model: its layers, settings or `--dtype` differ")
    return notes


def difference_table(change: Difference) -> Table:
    """Return a table of each stage's memory and time in two plans; the last row is the whole step."""
    rows = [_Change(f"stage {s.index}", s.bytes_before, s.bytes, s.us_before, s.us) for s in change.stages]
    whole = _Change("step", change.peak_bytes_before, change.peak_bytes, change.step_us_before, change.step_us)
    return table(
        [*rows, whole],
        column("label", "", attrgetter("label")),
        column("bytes_before", "memory\nbefore", attrgetter("bytes_before"), "bytes", drop=2),
        column("bytes", "memory\nnow", attrgetter("bytes"), "bytes"),
        column("more_bytes", "difference", _more_bytes, "bytes"),
        column("us_before", "time\nbefore", attrgetter("us_before"), "us", drop=1),
        column("us", "time\nnow", attrgetter("us"), "us"),
        column("more_us", "difference", _more_us, "percent"),
    )


class _Change(NamedTuple):
    label: str
    bytes_before: int | None
    bytes: int | None
    us_before: float | None
    us: float | None


def _per_s(row: ComparedPlan) -> float:
    return row.plan.predicted.samples_per_s


def _against(row: ComparedPlan, first: ComparedPlan) -> str:
    faster = "" if row is first else percent_difference(_per_s(first), _per_s(row))
    return faster if row.fits else f"{faster} OVER".strip()


def _more_bytes(row: _Change) -> str:
    if row.bytes_before is None or row.bytes is None:
        return NOTHING
    return f"{'+' if row.bytes >= row.bytes_before else '-'}{format_bytes(abs(row.bytes - row.bytes_before))}"


def _more_us(row: _Change) -> str:
    return NOTHING if row.us_before is None or row.us is None else percent_difference(row.us_before, row.us)


_WITHOUT_PLAN = {"none": "does not fit", "unknown": "none found"}
"""Text for a cluster without a plan, by `SweepCell.status`."""


def sweep_table(sweep: Sweep) -> Table:
    """Return a table with a row for each combination of a number of devices and a memory per device.

    Rows with the same number of devices form a group.
    """
    noun = _device_noun(sweep)
    return table(
        sweep.cells,
        column("devices", f"{noun}s", attrgetter("devices"), "count"),
        column("memory", "memory", lambda cell: exact_bytes_option(cell.memory_bytes), "count"),
        column("schedule", "schedule", _planned(lambda plan: schedule_of(plan.schedule).title), drop=1),
        column("plan", "plan", _planned(_shape), drop=2),
        column("step", "step", _planned(attrgetter("predicted.step_us")), "us"),
        column("samples", "samples/s", _planned(attrgetter("predicted.samples_per_s")), "rate"),
        column("per_device", f"per\n{noun}", lambda cell: cell.samples_per_device_s if cell.plan else None, "rate"),
        column("bubble", "bubble", _planned(attrgetter("predicted.bubble")), "percent", drop=4),
        column("peak", "peak", _planned(lambda plan: max(plan.peak_bytes_by_device())), "bytes", drop=3),
        column("notes", "", _notes),
        group=len(sweep.memory_bytes),
    )


def best_cluster_lines(sweep: Sweep) -> list[str]:
    """Return lines about the smallest, the fastest and the cheapest cluster (cheapest: most samples/s per device)."""
    if sweep.smallest is None:
        return ["this model fits on none of these clusters"]
    smallest = sweep.cells[sweep.smallest]
    with_plan = [cell for cell in sweep.cells if cell.plan is not None]
    # Of equally fast clusters, the smallest is reported.
    fastest = max(with_plan, key=lambda c: (_cell_per_s(c), -c.devices, -c.memory_bytes))
    cheapest, noun = sweep.cells[sweep.cheapest or 0], _device_noun(sweep)
    rates = rate_text(_cell_per_s(smallest)), rate_text(_cell_per_s(fastest)), rate_text(cheapest.samples_per_device_s)
    return [
        f"smallest that trains: {_cluster(smallest, noun)}, {rates[0]} samples/s{_run(smallest)}",
        f"fastest: {_cluster(fastest, noun)}, {rates[1]} samples/s{_run(fastest)}",
        f"cheapest: {_cluster(cheapest, noun)}, {rates[2]} samples/s each{_run(cheapest)}",
    ]


def _device_noun(sweep: Sweep) -> str:
    return next((gpu_noun(cell.plan) for cell in sweep.cells if cell.plan and cell.plan.tensor_parallel > 1), "device")


def _run(cell: SweepCell) -> str:
    if cell.training is None or cell.plan is None:
        return ""
    return f", {', '.join(run_words(cell.training, cell.plan.inputs))}"


def _cluster(cell: SweepCell, noun: str) -> str:
    return f"{pluralize(cell.devices, noun)} with {exact_bytes_option(cell.memory_bytes)}"


def _cell_per_s(cell: SweepCell) -> float:
    return cell.plan.predicted.samples_per_s if cell.plan is not None else 0.0


def _planned(value: Callable[[Plan], Value]) -> Callable[[SweepCell], Value]:
    return lambda cell: None if cell.plan is None else value(cell.plan)


def _shape(plan: Plan) -> str:
    replicas = f"{plan.replicas} replicas x " if plan.replicas > 1 else ""
    width = f"{plan.tensor_parallel} GPUs x " if plan.tensor_parallel > 1 else ""
    stages = pluralize(len(plan.stages), "stage")
    return f"{replicas}{stages} x {width}{pluralize(plan.micro_batches, 'micro-batch', 'es')}"


def _notes(cell: SweepCell) -> str:
    plan = cell.plan
    if plan is None:
        return _WITHOUT_PLAN[cell.status]
    used = plan.num_gpus
    notes = [f"{cell.devices - used} unused"] if used < cell.devices else []
    if cell.status == "feasible":
        notes.append(f"gap {percent(plan.solver.gap)}")
    return ", ".join(notes)
