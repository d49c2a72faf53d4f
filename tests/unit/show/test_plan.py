"""A plan's figures and its table of stages."""

import pytest

from planner.core.plan import SolverReport
from planner.core.units import format_bytes, format_us
from planner.show import plan_text
from tests.unit.show.samples import MIB, events_of, plan, profile, style

WIDE = style(120, wrap=False)


def test_headline():
    """The first lines name the schedule, its sizes and what is predicted."""
    planned = plan()
    head, figures = plan_text(planned, (), WIDE).splitlines()[:2]
    assert head == "GPipe, 3 stages \u00d7 4 micro-batches of 1 sample"
    assert f"step {format_us(planned.predicted.step_us)}" in figures
    assert "samples/s" in figures
    assert f"bubble {planned.predicted.bubble:.1%} (ideal 33.3%)".replace("%", " %") in figures
    assert "imbalance 1.00" in figures
    assert "recompute 0.0 %" in figures


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (SolverReport(method="exact", status="optimal"), "optimal: no plan is faster (exact)"),
        (SolverReport(method="cut", status="feasible", gap=0.05, lower_bound_us=9.5e3), "feasible, gap 5.0 %"),
        (SolverReport(method="cut", status="feasible", gap=0.05, lower_bound_us=9.5e3), "faster than 9.50 ms"),
        (SolverReport(method="given", status="given"), "given:"),
    ],
)
def test_how_good_the_plan_is(solver, words):
    """The certificate stands below the figures."""
    assert words in plan_text(plan(solver=solver), (), WIDE)


def test_stage_table():
    """One row per stage: its layers with their number, recomputation, times in ms, memory, cap and share."""
    planned = plan((1, 3, 2), recompute="except-last", cap=400 * MIB)
    lines = plan_text(planned, (), WIDE).splitlines()
    (row,) = [line for line in lines if line.startswith("1 ◀")]
    assert "block.0 … block.2 (3)" in row
    assert row.split()[-9:-4] == [
        "except-last",
        "3.000",
        "9.000",
        *format_bytes(planned.stages[1].memory.total).split(),
    ]
    assert row.split()[-4:] == ["400", "MiB", f"{planned.stages[1].memory.total / (400 * MIB):.0%}"[:-1], "%"]


def test_the_bottleneck_is_marked_once():
    """Only the slowest stage carries the mark, in either set of characters; a single stage needs none."""
    assert plan_text(plan((1, 3, 2)), (), WIDE).count("◀") == 1
    assert plan_text(plan((1, 3, 2)), (), style(unicode=False)).count("1 <") == 1
    assert "◀" not in plan_text(plan((6,)), (), WIDE)


def test_over_the_cap():
    """A stage over its cap is marked in the table and in the bars."""
    text = plan_text(plan(cap=40 * MIB), (), WIDE)
    table, bars = text.split("memory per stage")
    assert table.count(" !") == 3
    assert bars.count("! OVER") == 3


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_lost_in_few_columns(width):
    """Memory and cap of every stage stand in the text at any width."""
    planned = plan(of=profile())
    text = plan_text(planned, events_of(planned), style(width))
    assert text.count("of 120 MiB") == 3


def test_timeline_only_with_events():
    """Without events the timeline is left out."""
    assert "timeline" not in plan_text(plan(), (), WIDE)
    assert "timeline of one step" in plan_text(plan(), events_of(plan()), WIDE)


def test_unused_devices():
    """A plan that leaves devices unused says so."""
    assert "2 of 5 devices left unused" in plan_text(plan(devices=5), (), WIDE)
    assert "unused" not in plan_text(plan(), (), WIDE)
