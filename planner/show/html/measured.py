"""What a run measured, beside what the plan predicted."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import isfinite
from statistics import median

from planner.core.values.plan import Plan
from planner.core.values.printable import printable
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes, format_us
from planner.show.html.parts import Section, bar, layer_name, legend, note, table
from planner.show.markup import element, number, safe
from planner.show.views.numbers import NOTHING, difference, layer_range, percent

__all__ = ["measured_section", "run_section"]

_Pair = tuple[str, float, float]


def measured_section(plan: Plan, report: RunReport | None) -> Section:
    """Predicted beside measured: the step, each stage's forward and backward, each device's peak."""
    title = "Predicted beside measured"
    if report is None:
        body = note(
            "No run report was given. Train with `torchrun … train.py --report run.json`, then show the plan with "
            "`--run run.json`."
        )
        return Section(anchor="measured", title=title, body=body)
    cuts = [[(s.first, s.last) for s in stages] for stages in (plan.stages, report.stages)]
    if cuts[0] != cuts[1]:
        body = note("The run had other stages than the plan: there is nothing to compare stage by stage.")
        return Section(anchor="measured", title=title, body=body)
    rows = list(_rows(_pairs_of_times(plan, report), format_us))
    if report.bubble is not None:
        rows += _rows([("bubble", plan.predicted.bubble, report.bubble)], percent)
    rows += _rows(list(_peaks(plan, report)), format_bytes)
    body = table(
        (
            "",
            "predicted",
            "measured",
            "difference",
            "",
        ),
        rows,
    )
    body += legend([("t-predicted", "predicted"), ("t-measured", "measured")])
    steps = report.step_us[report.warmup_steps :] or report.step_us
    machine = f"{report.device.kind} {report.device.name}".strip()
    lead = f"Median of {len(steps)} steps on {machine}. Difference: measured against predicted."
    return Section(anchor="measured", title=title, lead=lead, body=body)


def _pairs_of_times(plan: Plan, report: RunReport) -> list[_Pair]:
    steps = report.step_us[report.warmup_steps :] or report.step_us
    pairs = [("step", plan.predicted.step_us, median(steps) if steps else 0.0)]
    both = list(zip(plan.stages, report.stages, strict=True))
    pairs += [(f"forward, stage {s.index}", s.forward_us, r.forward_us) for s, r in both]
    pairs += [(f"backward, stage {s.index}", s.backward_us, r.backward_us) for s, r in both]
    return pairs


def _peaks(plan: Plan, report: RunReport) -> Iterator[_Pair]:
    called = "stage" if plan.chunks == 1 else "device"
    for device in range(plan.num_devices):
        stages = plan.stages[device :: plan.num_devices]
        # The reserve is for what the device's allocator does not see.
        predicted = sum(stage.memory.total - stage.memory.reserve for stage in stages)
        measured = max(run.peak_bytes for run in report.stages[device :: plan.num_devices])
        yield f"peak memory, {called} {device}", predicted, measured


def _rows(pairs: Sequence[_Pair], text: Callable[[float], str]) -> Iterator[list[str]]:
    # The step is so much longer than a micro-batch that it has a scale of its own.
    rest = max((max(p, m) for label, p, m in pairs if label != "step"), default=0.0) or 1.0
    for label, predicted, measured in pairs:
        full = (max(predicted, measured) or 1.0) if label == "step" else rest
        track = bar("t-predicted", 0, predicted / full) + bar("t-measured", 0, measured / full)
        told = [text(predicted), text(measured)] if measured else [text(predicted), NOTHING]
        off = difference(predicted, measured) if measured else NOTHING
        yield [safe(label), *told, off, element("div", track, class_="pair", aria_hidden="true")]


def run_section(report: RunReport) -> Section:
    """The losses and the times of the steps."""
    charts = [
        _series("loss", report.losses, lambda value: f"{value:.4g}"),
        _series("step time", report.step_us, format_us),
    ]
    rows = [
        [
            f"{run.index}: {layer_name(printable(layer_range(run.first, run.last)))}",
            format_us(run.forward_us),
            format_us(run.backward_us),
            *(format_us(time) for time in (run.recompute_us, run.transfer_us, run.idle_us)),
            format_bytes(run.parameter_bytes),
            format_bytes(run.peak_bytes),
        ]
        for run in report.stages
    ]
    header = ("stage", "forward", "backward", "recomputation", "transfer", "idle", "parameters", "peak memory")
    stages = table(header, rows)
    lead = (
        f"{len(report.losses)} steps, the first {report.warmup_steps} to warm up; times are per micro-batch, transfer "
        "and idle time (waiting for what was there, or not yet) per step."
    )
    return Section(anchor="run", title="The run", lead=lead, body=element("div", *charts, class_="charts two") + stages)


def _series(title: str, values: Sequence[float], text: Callable[[float], str]) -> str:
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    every = max(1, len(values) // 200)
    points = [
        (n / max(1, len(values) - 1) * 100, 100 - (value - low) / span * 90)
        for n, value in enumerate(values)
        if n % every == 0 and isfinite(value)
    ]
    lines = [
        element("line", class_="curve", x1=f"{number(a)}%", x2=f"{number(c)}%", y1=b, y2=d)
        for (a, b), (c, d) in pairwise(points)
    ]
    told = f"{title}: first {text(values[0])}, last {text(values[-1])}; from {text(low)} to {text(high)}"
    picture = element("svg", *lines, width="100%", height=106.0, role="img", aria_label=told)
    return element("figure", element("figcaption", safe(told)), picture)
