"""Figures of a plan, and its table of stages."""

from dataclasses import replace

import pytest

from planner.core.schedule import SPLITTING
from planner.core.values.plan import FrontierPoint, SolverReport
from planner.core.values.units import format_bytes, format_us
from planner.show.html.page import plan_html
from planner.show.terminal.plan import plan_text
from planner.show.views.plan import ideal_bubble_words
from tests.unit.show.samples import MIB, events_of, interleaved, plan, profile, style, unlike

WIDE = style(120, wrap=False)


def first_line(planned, how=WIDE):
    return plan_text(planned, (), how).splitlines()[0]


def rows(planned, how=WIDE):
    """Return the rows of the table of stages without the mark of the slowest."""
    lines = plan_text(planned, (), how).split("memory per ")[0].splitlines()
    rule = next(n for n, line in enumerate(lines) if line.startswith(("──", "--")))
    table = lines[rule + 1 : lines.index("", rule)]
    return [line.replace(" ◀", "  ") for line in table]


def test_headline_has_schedule_sizes_and_figures():
    planned = plan()
    head, figures = plan_text(planned, (), WIDE).splitlines()[:2]
    assert head == "GPipe, 3 stages \u00d7 4 micro-batches of 1 sample"
    assert f"step {format_us(planned.predicted.step_us)}" in figures
    assert "samples/s" in figures
    assert f"bubble {planned.predicted.bubble:.1%} (ideal 33.3%)".replace("%", " %") in figures
    assert "imbalance 1.00" in figures
    assert "recompute 0.0 %" in figures


def test_headline_of_each_schedule():
    assert first_line(plan(schedule="1f1b")) == "1F1B, 3 stages \u00d7 4 micro-batches of 1 sample"
    chunks = "interleaved 1F1B, 3 devices \u00d7 2 chunks \u00d7 6 micro-batches of 1 sample"
    assert first_line(interleaved()) == chunks
    assert first_line(plan(replicas=2)) == "GPipe, 2 replicas of 3 stages \u00d7 4 micro-batches of 1 sample"
    both = plan((1,) * 6, micro_batches=6, schedule="interleaved", chunks=2, replicas=2)
    assert first_line(both).startswith("interleaved 1F1B, 2 replicas of 3 devices \u00d7 2 chunks \u00d7 6 ")


def test_groups_are_counted_in_gpus():
    groups = replace(plan(replicas=2, devices=50), tensor_parallel=8)
    assert first_line(groups) == "GPipe, 48 GPUs = 2 replicas \u00d7 3 stages \u00d7 8, 4 micro-batches of 1 sample"
    text = plan_text(groups, (), WIDE)
    assert "2 of 50 GPUs left unused" in text
    assert "memory per stage, on each of its 8 GPUs" in text
    several = first_line(replace(interleaved(), tensor_parallel=4))
    assert several == "interleaved 1F1B, 12 GPUs = 3 devices \u00d7 4, 2 chunks, 6 micro-batches of 1 sample"
    alone = replace(plan((6,), devices=9), tensor_parallel=4)
    assert "than the whole model on 4 GPUs that share its layers" in plan_text(alone, (), WIDE)
    points = tuple(
        FrontierPoint(micro_batches=m, micro_batch_size=1, tensor_parallel=2 * m, devices=2, step_us=9.0, peak_bytes=5)
        for m in (1, 2)
    )
    assert "GPUs per" in plan_text(replace(groups, frontier=points), (), WIDE)
    assert "GPUs per" not in plan_text(replace(groups, frontier=points[:0]), (), WIDE)


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (SolverReport(method="exact", status="optimal"), "optimal: no GPipe plan is faster (exact)"),
        (SolverReport(method="dynamic-programming", status="optimal"), "faster (dynamic program)"),
        (SolverReport(method="integer-programming", status="optimal"), "faster (integer program)"),
        (SolverReport(method="simulated", status="feasible", gap=0.1), "(bounds and simulation)"),
        (SolverReport(method="cut", status="feasible", gap=1e-5, lower_bound_us=9.5e3), "gap below 0.1 %: no"),
        (SolverReport(method="cut", status="feasible", gap=0.05, lower_bound_us=9.5e3), "feasible, gap 5.0 %"),
        (SolverReport(method="cut", status="feasible", gap=0.05, lower_bound_us=9.5e3), "faster than 9.50 ms"),
        (SolverReport(method="given", status="given"), "given:"),
    ],
)
def test_certificate_follows_the_figures(solver, words):
    assert words in plan_text(plan(solver=solver), (), WIDE)


@pytest.mark.parametrize(
    ("share", "gap", "bound"),
    [(0.97, "3.0 %", "faster than 35.4 ms"), (1.0, "0.0 %", "faster"), (0.9999, "below 0.1 %", "faster than 36.5 ms")],
)
def test_second_gap_follows_the_first(share, gap, bound):
    step_us = plan().predicted.step_us
    solver = SolverReport(
        method="simulated",
        status="feasible",
        gap=0.05,
        lower_bound_us=0.95 * step_us,
        named_lower_bound_us=share * step_us,
    )
    both = plan(solver=solver)
    both = replace(both, inputs=replace(both.inputs, schedule="auto"))
    first = f"no plan is faster than {format_us(0.95 * step_us)}, no plan with a named schedule is {bound}"
    assert f"feasible, gap 5.0 %, over the named schedules {gap}: {first} (" in plan_text(both, (), WIDE)
    assert f"{first} (gap 5.0 %, over the named schedules {gap})" in plan_html(both, None, None, None, digest="")


def test_ideal_bubble_is_shown_only_for_schedules_that_it_describes():
    assert "(ideal 33.3 %)" in plan_text(plan(), (), WIDE)
    for schedule in SPLITTING:
        assert ideal_bubble_words(replace(plan(), schedule=schedule.name)) == ""
    assert ideal_bubble_words(plan(schedule="1f1b")) == "ideal 33.3 %"


def test_certificate_names_the_numbers_of_chunks_tried():
    tried = replace(plan().inputs, schedule="interleaved", chunks=0)
    solver = SolverReport(method="simulated", status="optimal")
    assert "no interleaved 1F1B plan of 1 to 4 chunks is faster" in plan_text(
        replace(plan(solver=solver), inputs=tried), (), WIDE
    )
    fixed = replace(tried, chunks=3)
    assert "no interleaved 1F1B plan is faster" in plan_text(replace(plan(solver=solver), inputs=fixed), (), WIDE)


def test_stage_table():
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
    assert plan_text(plan((1, 3, 2)), (), WIDE).count("◀") == 1
    assert "◀" not in plan_text(plan((6,)), (), WIDE)


def test_stage_over_its_limit_is_marked_in_table_and_bars():
    text = plan_text(plan(cap=40 * MIB), (), WIDE)
    table, bars = text.split("memory per stage")
    assert table.count(" !") == 3
    assert bars.count("! OVER") == 3


@pytest.mark.parametrize("width", [60, 80, 120])
def test_memory_and_limit_are_shown_at_any_width(width):
    planned = plan(of=profile())
    text = plan_text(planned, events_of(planned), style(width))
    assert text.count("of 120 MiB") == 3


def test_timeline_needs_events():
    assert "timeline" not in plan_text(plan(), (), WIDE)
    assert "timeline of one step" in plan_text(plan(), events_of(plan()), WIDE)


def test_unused_devices_are_reported():
    assert "2 of 5 devices left unused\n" in plan_text(plan(devices=5), (), WIDE)
    assert "unused" not in plan_text(plan(), (), WIDE)
    assert "unused" not in plan_text(plan(replicas=2), (), WIDE)
    assert "1 of 7 devices left unused\n" in plan_text(plan(replicas=2, devices=7), (), WIDE)
    assert "1 of 4 devices left unused: device 3\n" in plan_text(unlike(), (), WIDE)
    assert "unused" not in plan_text(interleaved(), (), WIDE)


def asked_for(planned, *, replicas, solver="optimal", schedule="gpipe"):
    inputs = replace(planned.inputs, replicas=replicas, schedule=schedule)
    return replace(planned, inputs=inputs, solver=replace(planned.solver, status=solver))


def test_plan_without_cuts_is_reported_as_no_pipeline():
    copies, alone = plan((6,), replicas=3), plan((6,), devices=3)
    found = [
        (asked_for(copies, replicas=0), "under GPipe no cut is faster than 3 copies of the whole model"),
        (asked_for(copies, replicas=0, schedule="auto"), "no cut is faster than 3 copies of the whole model"),
        (asked_for(copies, replicas=0, solver="feasible"), "under GPipe no cut was found that is faster than 3 copies"),
        (copies, "3 copies of the whole model\n"),
        (alone, "under GPipe no cut is faster than the whole model on one device\n2 of 3 devices left unused\n"),
        (asked_for(alone, replicas=1, solver="given"), "the whole model on one device\n2 of 3"),
        (plan((6,)), "the whole model on one device\n"),
    ]
    for planned, words in found:
        assert f"\nnot a pipeline: {words}" in plan_text(planned, (), WIDE)
    assert "not a pipeline" not in plan_text(plan(replicas=2), (), WIDE)
    assert "device  layers" not in plan_text(copies, (), WIDE)


def test_chunks_have_a_column_for_their_device():
    """Memory is a part of the device's peak."""
    planned = interleaved()
    table = rows(planned)
    assert [row.split()[:2] for row in table] == [[str(k), str(k % 3)] for k in range(6)]
    assert table[0].endswith(format_bytes(planned.stages[0].memory.total))
    text = plan_text(planned, events_of(planned), WIDE)
    assert "share" not in text
    assert f"{format_bytes(planned.peak_bytes_by_device()[1])} of  120 MiB" in text.replace("of 120", "of  120")
    bars, timeline = text.split("memory per device")[1].split("timeline of one step")
    for section in (bars, timeline):
        assert [line[:8] for line in section.splitlines() if line.startswith("device ")][:3] == [
            "device 0",
            "device 1",
            "device 2",
        ]


def test_unequal_devices_have_a_column_with_their_speed():
    table = rows(unlike())
    assert [row[7:14].strip() for row in table] == ["0", "1 (2\u00d7)", "2"]
    assert rows(plan(caps=(120 * MIB, 130 * MIB, 140 * MIB)))[1].split()[:2] == ["1", "1"]
    narrow = plan_text(plan(speeds=(1.0, 1.5, 1.0)), (), style(60))
    assert "\n1 ◀    1 (1.5\u00d7)  block.1 …" in narrow or "\n1      1 (1.5\u00d7)  block.1 …" in narrow
    assert rows(plan())[1].split()[:2] == ["1", "block.1"]


def test_recomputed_layers_are_counted_and_listed():
    planned = plan((3, 3), recomputed=((0, 2), (3, 4, 5)))
    assert "2 of 3 layers" in rows(planned)[0]
    assert "3 of 3 layers" in rows(planned)[1]
    text = plan_text(planned, (), WIDE)
    assert "\n\nstage 0 recomputes [bold]stem[/bold], block.1\nstage 1 recomputes block.2 … encoder." in text
    assert "recomputes" not in plan_text(plan(recompute="always"), (), WIDE)


def recomputing(names, layers=1000):
    """Return a plan whose only stage recomputes layers with these names."""
    (stage,) = plan((6,)).stages
    stage = replace(stage, recompute="layers", recomputed=tuple(names), layers=layers)
    return replace(plan((6,)), stages=(stage,))


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["block_4", "block_5", "block_6", "head"], "block_4 … block_6 (3), head"),
        (["block_4", "block_5"], "block_4, block_5"),
        (["block_4", "block_6", "block_7", "block_8"], "block_4, block_6 … block_8 (3)"),
        (["0.a", "1.a", "2.a", "2.b"], "0.a … 2.a (3), 2.b"),
        (["b9", "b10", "b11"], "b9 … b11 (3)"),
        (["stem", "stem", "neck"], "stem, stem, neck"),
        (["h.0.attn", "h.0.mlp", "h.1.attn"], "h.0.attn, h.0.mlp, h.1.attn"),
    ],
)
def test_consecutive_names_are_shown_as_a_range(names, shown):
    """Ranges have at least three layers, and their number."""
    assert f"stage 0 recomputes {shown}\n" in plan_text(recomputing(names), (), WIDE)


def test_many_recomputed_layers_take_few_lines():
    """In a pipe, all names are listed."""
    names = [f"{'ab'[n % 2]}_{n}" for n in range(500)]
    lines = plan_text(recomputing(names), (), style(60)).splitlines()
    start = next(n for n, line in enumerate(lines) if "recomputes" in line)
    message = " ".join(lines[start : lines.index("", start)])
    assert lines.index("", start) - start <= 3
    assert message.count("_") + int(message.split()[-2]) == 500
    assert message.endswith(" more")
    piped = plan_text(recomputing(names), (), WIDE)
    assert " more" not in piped
    assert "b_499" in piped


def test_plan_from_an_estimate_is_marked() -> None:
    measured = plan()
    reference = replace(measured.inputs.profile, how="estimated")
    guessed = replace(measured, inputs=replace(measured.inputs, profile=reference))
    assert "estimated, not measured" in plan_text(guessed, (), style())
    assert "measured" not in plan_text(measured, (), style())
