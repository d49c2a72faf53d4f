"""Texts and tables of a plan: headline, stages, and the best plan for each number of micro-batches."""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from planner.core.judge.certainty import Certainty
from planner.core.schedule import GIVEN, SPLITTING, Schedule, schedule_of
from planner.core.values.limits import MOST_CHUNKS
from planner.core.values.plan import FrontierPoint, Plan, Stage
from planner.core.values.units import format_us, pluralize
from planner.show.views.certainty import rate_words, step_words
from planner.show.views.memory import share_of_limit
from planner.show.views.numbers import layer_range, percent
from planner.show.views.table import Column, Table, Value, column, table

_LEAST_GAP: Final = 0.0005
"""Smallest gap that is shown as a number; smaller gaps are shown as `below 0.1 %`."""


def plan_headline(plan: Plan) -> str:
    """Return schedule, number of stages and number of micro-batches in one line."""
    by = " \u00d7 "
    shape = pluralize(plan.num_devices, "stage")
    if plan.chunks > 1:
        shape = f"{pluralize(plan.num_devices, 'device')}{by}{plan.chunks} chunks"
    if plan.tensor_parallel > 1:
        shape, by = gpu_count_text(plan), ", "
    elif plan.replicas > 1:
        shape = f"{plan.replicas} replicas of {shape}"
    micro_batches = pluralize(plan.micro_batches, "micro-batch", "es")
    samples = pluralize(plan.micro_batch_size, "sample")
    return f"{schedule_of(plan.schedule).title}, {shape}{by}{micro_batches} of {samples}"


def gpu_count_text(plan: Plan) -> str:
    """Return the number of GPUs of a plan with tensor parallelism, such as `16 GPUs = 2 replicas x 4 stages x 2`.

    The last factor is the number of GPUs that share each stage.
    """
    groups = pluralize(plan.num_devices, "stage" if plan.chunks == 1 else "device")
    factors = [*([f"{plan.replicas} replicas"] if plan.replicas > 1 else []), groups, str(plan.tensor_parallel)]
    chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
    product = " \u00d7 ".join(factors)
    return f"{pluralize(plan.num_gpus, 'GPU')} = {product}{chunks}"


def gpu_noun(plan: Plan) -> str:
    """Return `GPU` for a plan with tensor parallelism, otherwise `device`."""
    return "device" if plan.tensor_parallel == 1 else "GPU"


def step_rate_bubble_words(plan: Plan, certainty: Certainty | None = None) -> tuple[str, str, str]:
    """Return step time, samples per second and bubble as texts."""
    return (
        f"step {step_words(plan, certainty)}",
        f"{rate_words(plan, certainty)} samples/s",
        f"bubble {percent(plan.predicted.bubble)}",
    )


def ideal_bubble_words(plan: Plan) -> str:
    """Return a text with the bubble that stages of equal time would have; empty for schedules with a split backward."""
    if schedule_of(plan.schedule, plan.order).splits_backward:
        return ""
    return f"ideal {percent(plan.predicted.ideal_bubble)}"


def optimality_text(plan: Plan) -> str:
    """Return a text about what the solver proved, such as `no plan is faster`; empty if it proved nothing."""
    solver, schedule = plan.solver, plan.inputs.schedule
    whole = "plan" if schedule == "auto" else f"{schedule_of(schedule).title} plan"
    if schedule != "auto" and not plan.inputs.chunks and _is_open_in_chunks(schedule_of(schedule)):
        whole += f" of 1 to {MOST_CHUNKS} chunks"
    if schedule == GIVEN:
        whole = "plan with this schedule"
    if solver.status == "optimal":
        return f"no {whole} is faster"
    if solver.status == "feasible":
        return f"no {whole} is faster than {format_us(solver.lower_bound_us)}{_named_bound_words(plan)}"
    return ""


def _named_bound_words(plan: Plan) -> str:
    named_us = plan.solver.named_lower_bound_us
    if not named_us:
        return ""
    least = "" if plan.solver.named_schedule_gap(plan.predicted.step_us) == 0 else f" than {format_us(named_us)}"
    return f", no plan with a named schedule is faster{least}"


def gap_words(plan: Plan) -> str:
    """Return the gap between the plan's step time and the lower bound of all allowed plans, as text.

    All schedules except `search` are named schedules. If a higher lower bound is known for plans with named schedules,
    the text also contains the gap between the step time and that bound.
    """
    named_schedule_gap = plan.solver.named_schedule_gap(plan.predicted.step_us)
    over_named = "" if named_schedule_gap is None else f", over the named schedules {_gap_text(named_schedule_gap)}"
    return f"gap {_gap_text(plan.solver.gap)}{over_named}"


def _gap_text(gap: float) -> str:
    return percent(gap) if gap >= _LEAST_GAP or gap == 0 else "below 0.1 %"


def _is_open_in_chunks(schedule: Schedule) -> bool:
    return schedule.is_chunked and schedule.exact_chunks is None and not schedule.needs_search


def has_unlike_devices(plan: Plan) -> bool:
    """Return True if devices differ in memory limit or speed."""
    inputs = plan.inputs
    return len(set(inputs.memory_bytes)) > 1 or len({1.0, *inputs.speeds}) > 1


def plan_stage_table(plan: Plan, *, brief: bool = False) -> Table:
    """Return a table of stages that marks the slowest one and exceeded limits.

    If `brief`, the table has no numbers of recomputed layers.
    """
    slowest = frozenset({plan.predicted.bottleneck_stage} if len(plan.stages) > 1 else ())
    over = frozenset(s.index for s in plan.stages if s.memory.total > s.memory_bytes)
    return table(
        plan.stages,
        column("stage", "stage", lambda s: str(s.index), marked=slowest),
        column("layers", "layers", lambda s: layer_range(s.first, s.last, s.layers)),
        column("recompute", "recompute", attrgetter("recompute") if brief else _recompute),
        column("device", "device", lambda s: str(plan.device_of(s))),
        column("placed", "device", lambda s: _placed(s, plan)),
        column("forward", "forward", attrgetter("forward_us"), "us", per="micro-batch"),
        column("backward", "backward", attrgetter("backward_us"), "us", per="micro-batch"),
        column("memory", "memory", attrgetter("memory.total"), "bytes"),
        column("limit", "limit", attrgetter("memory_bytes"), "bytes"),
        column("share", "share", lambda s: share_of_limit(s.memory.total, s.memory_bytes), "share", marked=over),
    )


def _recompute(stage: Stage) -> str:
    return f"{len(stage.recomputed)} of {pluralize(stage.layers, 'layer')}" if stage.recomputed else stage.recompute


def _placed(stage: Stage, plan: Plan) -> str:
    device, speeds = plan.device_of(stage), plan.inputs.speeds
    speed = speeds[device] if device < len(speeds) else 1.0
    return str(device) if speed == 1 else f"{device} ({speed:g}\u00d7)"


NO_PLAN = "no plan fits"


def frontier_has_replicas(plan: Plan) -> bool:
    """Return True if one of the best plans in `plan.frontier` has several replicas."""
    return any(point.replicas != 1 for point in plan.frontier)


def frontier_table(plan: Plan) -> Table:
    """Return a table of the best plan for each number of micro-batches and replicas."""
    points = plan.frontier
    chosen = (plan.micro_batches, plan.replicas)
    marked = frozenset(n for n, point in enumerate(points) if (point.micro_batches, point.replicas) == chosen)

    chunked = any(schedule_of(point.schedule).is_chunked for point in points if point.fits)
    return table(
        points,
        column("micro_batches", "M", attrgetter("micro_batches"), "count", marked=marked),
        column("replicas", "replicas", attrgetter("replicas"), "count"),
        *_width_column(points),
        column("micro_batch_size", "b", attrgetter("micro_batch_size"), "count"),
        column("schedule", "schedule", lambda p: schedule_of(p.schedule).title if p.fits else None, drop=1),
        column("devices", "devices" if chunked else "stages", _fitting("devices"), "count", drop=2),
        column("step", "step", _fitting("step_us", NO_PLAN), "us", per="step"),
        column("samples", "samples/s", _fitting("samples_per_s"), "rate", drop=4),
        column("bubble", "bubble", _fitting("bubble"), "percent", drop=3),
        column("peak", "peak per\ndevice", _fitting("peak_bytes"), "bytes"),
        column("recompute", "recompute", _fitting("recompute_share"), "percent", drop=5),
    )


def schedules_table(plan: Plan) -> Table:
    """Return a table of the best plan of each schedule, with marks for the plan's schedule and for short searches."""
    points, limit = plan.schedules, max(plan.inputs.memory_bytes)
    short = frozenset(n for n, point in enumerate(points) if point.short_search)
    marked = frozenset(n for n, point in enumerate(points) if point.schedule == plan.schedule)
    return table(
        points,
        column("schedule", "schedule", lambda p: schedule_of(p.schedule).title, marked=marked),
        column("micro_batches", "M", _fitting("micro_batches"), "count", drop=2),
        *_width_column(points),
        column("devices", "devices", _fitting("devices"), "count", drop=1),
        column("step", "step", _fitting("step_us", "none found"), "us", per="step", marked=short),
        column("bubble", "bubble", _fitting("bubble"), "percent"),
        column("peak", "peak of the\nfullest device", _fitting("peak_bytes"), "bytes"),
        column("share", "of its limit", lambda p: share_of_limit(p.peak_bytes, limit) if p.fits else None, "share"),
        column("fits", "fits", lambda p: "yes" if p.fits else "unknown"),
    )


def _width_column(points: tuple[FrontierPoint, ...]) -> list[tuple[Column, Callable[[FrontierPoint], Value]]]:
    if all(point.tensor_parallel == 1 for point in points):
        return []
    return [column("tensor_parallel", "GPUs per\nstage", _fitting("tensor_parallel"), "count")]


SHORT_MARK: Final = " *"
"""Suffix of the step times that short searches found."""


def short_search_note(plan: Plan) -> str:
    """Return a footnote for step times that short searches found; empty if there are none."""
    if not any(point.short_search for point in plan.schedules):
        return ""
    return "* from a short search; `solve --frontier` searches longer and may find a faster plan"


def untried_schedules_note(plan: Plan) -> str:
    """Return a note on schedules with a split backward that were not tried; empty if there are none."""
    tried = {point.schedule for point in plan.schedules}
    missing = [schedule.title for schedule in SPLITTING if schedule.name not in tried]
    if not missing:
        return ""
    return f"not tried, because split backward times or layers are missing: {', '.join(missing)}"


def _fitting(field: str, otherwise: str | None = None) -> Callable[[FrontierPoint], Value]:
    return lambda point: getattr(point, field) if point.fits else otherwise
