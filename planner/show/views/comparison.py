"""Plans beside each other, and what differs from one to the next, as tables."""

from collections.abc import Callable

from planner.core.judge.comparison import ComparedPlan, Comparison
from planner.core.judge.difference import Difference
from planner.core.schedule import SCHEDULES
from planner.core.values.units import format_bytes
from planner.show.views.numbers import NOTHING, difference
from planner.show.views.table import Column, Table, Unit, Value

__all__ = ["comparison_table", "difference_table"]


def comparison_table(comparison: Comparison) -> Table:
    """A row per plan; the last column says by how much it is faster than the first, and whether it is over its caps."""

    def column(name: str, title: str, unit: Unit, value: Callable[[ComparedPlan], Value], *, goes: int = 0) -> Column:
        return Column(name=name, title=title, unit=unit, values=tuple(map(value, comparison.plans)), goes=goes)

    first = comparison.plans[0]
    return Table(
        columns=(
            column("plan", "plan", "text", lambda row: row.path),
            column("schedule", "schedule", "text", lambda row: SCHEDULES[row.plan.schedule].title, goes=2),
            column("devices", "devices", "count", _devices),
            column(
                "size", "M x b", "count", lambda row: f"{row.plan.micro_batches} x {row.plan.micro_batch_size}", goes=3
            ),
            column("step", "step", "us", lambda row: row.plan.predicted.step_us, goes=1),
            column("samples", "samples/s", "rate", _per_s),
            column("per_device", "per\ndevice", "rate", lambda row: _per_s(row) / _devices(row), goes=5),
            column("bubble", "bubble", "percent", lambda row: row.plan.predicted.bubble, goes=4),
            column("peak", "peak", "bytes", lambda row: max(row.plan.device_bytes())),
            column("cap", "cap", "bytes", lambda row: min(stage.memory_bytes for stage in row.plan.stages), goes=6),
            column("against", "", "percent", lambda row: _against(row, first)),
        )
    )


def difference_table(found: Difference) -> Table:
    """A row per stage, and one for the whole step, with its highest peak."""
    stages = found.stages
    bytes_before = (*(stage.bytes_before for stage in stages), found.peak_bytes_before)
    bytes_now = (*(stage.bytes for stage in stages), found.peak_bytes)
    us_before = (*(stage.us_before for stage in stages), found.step_us_before)
    us_now = (*(stage.us for stage in stages), found.step_us)
    return Table(
        columns=(
            Column(name="stage", title="", values=(*(f"stage {stage.index}" for stage in stages), "step")),
            Column(name="bytes_before", title="memory\nbefore", unit="bytes", values=bytes_before, goes=2),
            Column(name="bytes", title="memory\nnow", unit="bytes", values=bytes_now),
            Column(
                name="more_bytes",
                title="difference",
                unit="bytes",
                values=tuple(map(_more_bytes, bytes_before, bytes_now)),
            ),
            Column(name="us_before", title="time\nbefore", unit="us", values=us_before, goes=1),
            Column(name="us", title="time\nnow", unit="us", values=us_now),
            Column(name="more_us", title="difference", unit="percent", values=tuple(map(_more_us, us_before, us_now))),
        )
    )


# Private functions


def _devices(row: ComparedPlan) -> int:
    return row.plan.num_devices * row.plan.replicas


def _size(row: ComparedPlan) -> str:
    return f"{row.plan.micro_batches} x {row.plan.micro_batch_size}"


def _per_s(row: ComparedPlan) -> float:
    return row.plan.predicted.samples_per_s


def _against(row: ComparedPlan, first: ComparedPlan) -> str:
    faster = "" if row is first else difference(_per_s(first), _per_s(row))
    return faster if row.fits else f"{faster} OVER".strip()


def _more_bytes(before: int | None, now: int | None) -> str:
    if before is None or now is None:
        return NOTHING
    return f"{'+' if now >= before else '-'}{format_bytes(abs(now - before))}"


def _more_us(before: float | None, now: float | None) -> str:
    return NOTHING if before is None or now is None else difference(before, now)
