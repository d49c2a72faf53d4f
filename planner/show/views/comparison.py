"""Plans beside each other, and what differs from one to the next, as tables."""

from operator import attrgetter
from typing import NamedTuple

from planner.core.judge.difference import ComparedPlan, Comparison, Difference
from planner.core.schedule import schedule_of
from planner.core.values.units import format_bytes
from planner.show.views.numbers import NOTHING, difference
from planner.show.views.table import Table, column, table


def comparison_table(comparison: Comparison) -> Table:
    """A row per plan; the last column says by how much it is faster than the first, and whether it is over its caps."""
    first = comparison.plans[0]
    return table(
        comparison.plans,
        column("plan", "plan", attrgetter("path")),
        column("schedule", "schedule", lambda row: schedule_of(row.plan.schedule).title, goes=2),
        column("devices", "devices", _devices, "count"),
        column("size", "M x b", lambda row: f"{row.plan.micro_batches} x {row.plan.micro_batch_size}", "count", goes=3),
        column("step", "step", attrgetter("plan.predicted.step_us"), "us", goes=1),
        column("samples", "samples/s", _per_s, "rate"),
        column("per_device", "per\ndevice", lambda row: _per_s(row) / _devices(row), "rate", goes=5),
        column("bubble", "bubble", attrgetter("plan.predicted.bubble"), "percent", goes=4),
        column("peak", "peak", lambda row: max(row.plan.device_bytes()), "bytes"),
        column("cap", "cap", lambda row: min(stage.memory_bytes for stage in row.plan.stages), "bytes", goes=6),
        column("against", "", lambda row: _against(row, first), "percent"),
    )


def difference_table(change: Difference) -> Table:
    """A row per stage, and one for the whole step, with its highest peak."""
    rows = [_Change(f"stage {s.index}", s.bytes_before, s.bytes, s.us_before, s.us) for s in change.stages]
    whole = _Change("step", change.peak_bytes_before, change.peak_bytes, change.step_us_before, change.step_us)
    return table(
        [*rows, whole],
        column("what", "", attrgetter("what")),
        column("bytes_before", "memory\nbefore", attrgetter("bytes_before"), "bytes", goes=2),
        column("bytes", "memory\nnow", attrgetter("bytes"), "bytes"),
        column("more_bytes", "difference", lambda row: _more_bytes(row.bytes_before, row.bytes), "bytes"),
        column("us_before", "time\nbefore", attrgetter("us_before"), "us", goes=1),
        column("us", "time\nnow", attrgetter("us"), "us"),
        column("more_us", "difference", lambda row: _more_us(row.us_before, row.us), "percent"),
    )


# Private functions


class _Change(NamedTuple):
    """Memory and time of a stage, or of the step, before and now."""

    what: str
    bytes_before: int | None
    bytes: int | None
    us_before: float | None
    us: float | None


def _devices(row: ComparedPlan) -> int:
    return row.plan.num_devices * row.plan.replicas


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
