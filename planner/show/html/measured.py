"""Sections about a run: losses, times, and comparison with the plan's predictions."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import isfinite

from planner.core.judge.calibration import timed_steps_us
from planner.core.judge.verification import ComparedFigure, Quantity, compared_figures
from planner.core.values.plan import Plan
from planner.core.values.printable import printable
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes, format_us
from planner.show.html.parts import (
    Section,
    bar_part,
    chart_figure,
    chart_line,
    html_table,
    layer_name_markup,
    legend,
    remark,
)
from planner.show.markup import element, escape_text
from planner.show.views.measured import (
    HEADERS,
    OF_REPLICAS,
    difference_words,
    figure_label,
    ran_other_stages,
    run_table,
    times_warning,
)
from planner.show.views.numbers import NOTHING, percent, row_noun


def measured_section(plan: Plan, report: RunReport) -> Section:
    """Return the comparison of predicted and measured times and memory."""
    title = "Predicted and measured"
    if ran_other_stages(plan, report):
        body = remark("The run had other stages than the plan, so stages cannot be compared.")
        return Section(anchor="measured", title=title, body=body)
    figures, place = compared_figures(plan, report), row_noun(plan.chunks)
    rows = [
        row
        for text, quantities in _SCALES
        for row in _rows([figure for figure in figures if figure.what in quantities], text, place)
    ]
    body = html_table(("", *HEADERS, ""), rows)
    body += legend([("t-predicted", "predicted"), ("t-measured", "measured")])
    machine = f"{report.device.kind} {report.device.name}".strip()
    lead = f"Median of {len(timed_steps_us(report))} steps on {machine}. Difference: measured relative to predicted."
    if len({run.replica for run in report.stages}) > 1:
        lead += f" Measured: {OF_REPLICAS}."
    lead += _attention(report)
    return Section(anchor="measured", title=title, lead=lead, body=body)


_SCALES: tuple[tuple[Callable[[float], str], tuple[Quantity, ...]], ...] = (
    (format_us, ("step_us", "forward_us", "backward_us", "backward_input_us", "backward_weight_us")),
    (percent, ("bubble",)),
    (format_bytes, ("peak_bytes",)),
)
"""Pairs of a formatting function and its quantities. Bars of the same pair share a scale; `step_us` has its own."""


def _rows(figures: Sequence[ComparedFigure], text: Callable[[float], str], place: str) -> Iterator[list[str]]:
    # The step time is much longer than times of a micro-batch, so its bar has its own scale.
    most = max((max(f.predicted, f.measured) for f in figures if f.what != "step_us"), default=0.0) or 1.0
    for row in figures:
        full = (max(row.predicted, row.measured) or 1.0) if row.what == "step_us" else most
        track = bar_part("t-predicted", 0, row.predicted / full) + bar_part("t-measured", 0, row.measured / full)
        measured = text(row.measured) if row.measured else NOTHING
        bars = element("div", track, class_="pair", aria_hidden="true")
        yield [escape_text(figure_label(row, place)), text(row.predicted), measured, difference_words(row), bars]


def run_section(report: RunReport) -> Section:
    """Return charts of a run's losses and step times, and a table of its stages."""
    charts = [
        _series("loss", report.losses, lambda value: f"{value:.4g}"),
        _series("step time", report.step_us, format_us),
    ]
    shown = run_table(report).with_titles(recompute="recomputation")
    layers = [layer_name_markup(printable(text)) for text in shown.column("layers").texts()]
    rows = [[f"{stage}: {names}", *rest] for names, (stage, _, *rest) in zip(layers, shown.rows(), strict=True)]
    stages = html_table([column.heading for column in shown.columns if column.name != "layers"], rows)
    lead = (
        f"{len(report.losses)} steps, including {report.warmup_steps} for warm-up. Times are per micro-batch. Transfer "
        "times (waiting for data that was ready) and idle times (waiting for data that was not) are per step."
    ) + _attention(report)
    return Section(anchor="run", title="Run", lead=lead, body=element("div", *charts, class_="charts") + stages)


def _attention(report: RunReport) -> str:
    warning = times_warning(report)
    return f" Attention: {warning}." if warning else ""


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
    lines = [chart_line("curve", *zip(begin, end, strict=True)) for begin, end in pairwise(points)]
    words = f"{title}: first {text(values[0])}, last {text(values[-1])}; from {text(low)} to {text(high)}"
    return chart_figure(words, *lines, height=106.0)
