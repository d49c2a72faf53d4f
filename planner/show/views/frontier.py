"""The trade-off over the number of micro-batches: the best plan for each of them, the chosen one marked."""

from collections.abc import Callable
from operator import attrgetter

from planner.core.schedule import schedule_of
from planner.core.values.plan import FrontierPoint, Plan
from planner.show.views.table import Table, Value, column, table

NO_PLAN = "no plan fits"


def has_several_replicas(plan: Plan) -> bool:
    """Whether points differ in more than M."""
    return any(point.replicas != 1 for point in plan.frontier)


def frontier_table(plan: Plan) -> Table:
    """A row per point; where no plan fits, M, replicas and b are all that is known."""
    points = plan.frontier
    chosen = (plan.micro_batches, plan.replicas)
    marked = frozenset(n for n, point in enumerate(points) if (point.micro_batches, point.replicas) == chosen)

    chunked = any(schedule_of(point.schedule).is_chunked for point in points if point.fits)
    return table(
        points,
        column("micro_batches", "M", attrgetter("micro_batches"), "count", marked=marked),
        column("replicas", "replicas", attrgetter("replicas"), "count"),
        column("micro_batch_size", "b", attrgetter("micro_batch_size"), "count"),
        column("schedule", "schedule", lambda p: schedule_of(p.schedule).title if p.fits else None, goes=1),
        column("devices", "devices" if chunked else "stages", _fitting("devices"), "count", goes=2),
        column("step", "step", _fitting("step_us", NO_PLAN), "us", per="step"),
        column("samples", "samples/s", _fitting("samples_per_s"), "rate", goes=4),
        column("bubble", "bubble", _fitting("bubble"), "percent", goes=3),
        column("peak", "peak per\ndevice", _fitting("peak_bytes"), "bytes"),
        column("recompute", "recompute", _fitting("recompute_share"), "percent", goes=5),
    )


def _fitting(field: str, otherwise: str | None = None) -> Callable[[FrontierPoint], Value]:
    """Reads a field of a point where a plan fits."""
    return lambda point: getattr(point, field) if point.fits else otherwise
