"""Tables that all media share."""

from dataclasses import replace

import pytest

from planner.core.judge.difference import ComparedPlan, Comparison
from planner.show.html.measured import run_section
from planner.show.terminal.tables import fit_columns, table_width
from planner.show.views.comparison import comparison_table
from planner.show.views.measured import pipeline_words, run_table
from planner.show.views.numbers import percent
from planner.show.views.plan import plan_stage_table
from planner.show.views.table import column, table
from tests.unit.show.samples import plan, report, style

WORDS = table(
    ["a", "bb"],
    column("name", "name", str),
    column("size", "size in\nletters", len, "count", drop=2),
    column("time", "time", lambda word: 1500.0 * len(word), "us", per="word", drop=1),
)


def replicated():
    """Return a run of two replicas with three stages each."""
    run = report(plan())
    return replace(run, stages=(*run.stages, *(replace(stage, replica=1) for stage in run.stages)))


def test_single_times_have_their_own_unit_and_columns_a_common_one():
    assert WORDS.rows() == (("a", "1", "1.50 ms"), ("bb", "2", "3.00 ms"))
    times = WORDS.column("time")
    assert times.texts(WORDS.time_units()["word"]) == ("1.500", "3.000")
    assert replace(times, values=(None, "no plan fits")).texts() == ("-", "no plan fits")


def test_comparison_of_groups_counts_gpus():
    alone = ComparedPlan(path="a.yaml", recomputed=True, fits=True, plan=plan())
    groups = replace(alone, path="b.yaml", plan=replace(plan(), tensor_parallel=4))
    shown = comparison_table(Comparison(plans=(alone, groups)))
    assert shown.column("devices").title == "GPUs"
    assert shown.column("devices").values == (3, 12)
    assert shown.column("tensor_parallel").values == (1, 4)
    assert "tensor_parallel" not in [c.name for c in comparison_table(Comparison(plans=(alone,))).columns]


def test_rounding_errors_are_not_shown_as_negative():
    """A pipeline of one stage may have a bubble of -1e-17."""
    assert percent(-1e-17) == "0.0 %"
    assert percent(-0.0014, decimals=2) == "-0.14 %"


@pytest.mark.parametrize(("width", "names"), [(60, "name"), (66, "name time"), (80, "name size time")])
def test_less_important_columns_are_dropped_first(width, names):
    view = WORDS.with_texts("name", ["n" * 55, ""])
    kept = fit_columns(view, style(width))
    assert " ".join(c.name for c in kept.columns) == names
    assert table_width(kept) <= width
    assert fit_columns(view, style(60, wrap=False)) == view


def test_stages_of_replicas_have_different_names():
    assert pipeline_words(replicated()) == "3 stages in 2 replicas"
    assert run_table(replicated()).column("stage").values[2:4] == ("2", "0, replica 1")
    assert "0, replica 1: " in run_section(replicated()).body


def test_stages_over_their_limit_and_the_slowest_are_marked():
    over = plan_stage_table(plan(cap=1000))
    assert over.column("share").marked == {0, 1, 2}
    assert plan_stage_table(plan()).column("share").marked == frozenset()
    assert over.column("stage").marked == {plan().predicted.bottleneck_stage}
    assert plan_stage_table(plan((6,))).column("stage").marked == frozenset()
