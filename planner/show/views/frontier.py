"""The trade-off over the number of micro-batches: the best plan for each of them, the chosen one marked."""

from collections.abc import Callable
from operator import attrgetter

from planner.core.schedule import SCHEDULES
from planner.core.values.plan import FrontierPoint, Plan
from planner.show.views.numbers import NOTHING
from planner.show.views.table import Column, Table, Unit, Value

__all__ = ["NO_PLAN", "frontier_table", "has_several_replicas"]

NO_PLAN = "no plan fits"


def has_several_replicas(plan: Plan) -> bool:
    """Whether points differ in more than M."""
    return any(point.replicas != 1 for point in plan.frontier)


def frontier_table(plan: Plan) -> Table:
    """A row per point; where no plan fits, M, replicas and b are all that is known."""
    points = plan.frontier
    chosen = (plan.micro_batches, plan.replicas)
    marked = frozenset(n for n, point in enumerate(points) if (point.micro_batches, point.replicas) == chosen)

    def column(
        name: str,
        title: str,
        unit: Unit,
        value: Callable[[FrontierPoint], Value],
        *,
        unfit: str | None = NOTHING,
        goes: int = 0,
    ) -> Column:
        values = tuple(value(point) if point.fits or unfit is None else unfit for point in points)
        per = "step" if unit == "us" else ""
        return Column(name=name, title=title, unit=unit, per=per, values=values, marked=marked, goes=goes)

    chunked = any(SCHEDULES[point.schedule].is_chunked for point in points if point.fits)
    return Table(
        columns=(
            column("micro_batches", "M", "count", attrgetter("micro_batches"), unfit=None),
            column("replicas", "replicas", "count", attrgetter("replicas"), unfit=None),
            column("micro_batch_size", "b", "count", attrgetter("micro_batch_size"), unfit=None),
            column("schedule", "schedule", "text", lambda p: SCHEDULES[p.schedule].title, goes=1),
            column("devices", "devices" if chunked else "stages", "count", attrgetter("devices"), goes=2),
            column("step", "step", "us", attrgetter("step_us"), unfit=NO_PLAN),
            column("samples", "samples/s", "rate", attrgetter("samples_per_s"), goes=4),
            column("bubble", "bubble", "percent", attrgetter("bubble"), goes=3),
            column("peak", "peak per\ndevice", "bytes", attrgetter("peak_bytes")),
            column("recompute", "recompute", "percent", attrgetter("recompute_share"), goes=5),
        )
    )
