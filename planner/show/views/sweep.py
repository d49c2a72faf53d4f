"""Many clusters as a table, and which of them is the smallest that trains."""

from collections.abc import Callable
from operator import attrgetter

from planner.core.schedule import schedule_of
from planner.core.values.plan import Plan
from planner.core.values.sweep import Sweep, SweepCell
from planner.core.values.units import counted, exact_bytes_option
from planner.show.views.numbers import percent, rate
from planner.show.views.table import Table, Value, column, table

_NONE = {"none": "does not fit", "unknown": "no plan in time"}


def sweep_table(sweep: Sweep) -> Table:
    """A row per cell, grouped by the number of devices."""
    return table(
        sweep.cells,
        column("devices", "devices", attrgetter("devices"), "count"),
        column("memory", "memory", lambda cell: exact_bytes_option(cell.memory_bytes), "count"),
        column("schedule", "schedule", _planned(lambda plan: schedule_of(plan.schedule).title), goes=1),
        column("plan", "plan", _planned(_shape), goes=2),
        column("step", "step", _planned(attrgetter("predicted.step_us")), "us"),
        column("samples", "samples/s", _planned(attrgetter("predicted.samples_per_s")), "rate"),
        column("per_device", "per\ndevice", lambda cell: cell.samples_per_device_s if cell.plan else None, "rate"),
        column("bubble", "bubble", _planned(attrgetter("predicted.bubble")), "percent", goes=4),
        column("peak", "peak", _planned(lambda plan: max(plan.device_bytes())), "bytes", goes=3),
        column("notes", "", _notes),
        group=len(sweep.memory_bytes),
    )


def best_words(sweep: Sweep) -> list[str]:
    """Which cluster is the smallest, the fastest, and the one that makes most of its devices."""
    if sweep.smallest is None:
        return ["none of these clusters trains this model"]
    smallest = sweep.cells[sweep.smallest]
    with_plan = [cell for cell in sweep.cells if cell.plan is not None]
    # Of clusters that do the same the smallest.
    fastest = max(with_plan, key=lambda c: (_per_s(c), -c.devices, -c.memory_bytes))
    thriftiest = max(with_plan, key=lambda c: (c.samples_per_device_s, -c.devices, -c.memory_bytes))
    return [
        f"smallest that trains: {_cluster(smallest)}, {rate(_per_s(smallest))} samples/s",
        f"fastest: {_cluster(fastest)}, {rate(_per_s(fastest))} samples/s",
        f"most per device: {_cluster(thriftiest)}, {rate(thriftiest.samples_per_device_s)} samples/s each",
    ]


# Private functions


def _cluster(cell: SweepCell) -> str:
    return f"{counted(cell.devices, 'device')} with {exact_bytes_option(cell.memory_bytes)}"


def _per_s(cell: SweepCell) -> float:
    return cell.plan.predicted.samples_per_s if cell.plan is not None else 0.0


def _planned(value: Callable[[Plan], Value]) -> Callable[[SweepCell], Value]:
    """Reads a value of the cell's plan, if it has one."""
    return lambda cell: None if cell.plan is None else value(cell.plan)


def _shape(plan: Plan) -> str:
    return f"{counted(len(plan.stages), 'stage')} x {counted(plan.micro_batches, 'micro-batch', 'es')}"


def _notes(cell: SweepCell) -> str:
    plan = cell.plan
    if plan is None:
        return _NONE[cell.status]
    used = plan.num_devices * plan.replicas
    notes = [f"{cell.devices - used} unused"] if used < cell.devices else []
    if cell.status == "feasible":
        notes.append(f"gap {percent(plan.solver.gap)}")
    return ", ".join(notes)
