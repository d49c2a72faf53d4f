"""Run reports, alone and compared with their plan."""

from dataclasses import replace

import pytest

from planner.core.judge.verification import compared_figures
from planner.show.html.measured import run_section
from planner.show.terminal.run import plan_and_run_text, run_text
from tests.unit.show.samples import MIB, in_a_v, interleaved, plan, report, style

WIDE = style(120, wrap=False)


def row(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


@pytest.mark.parametrize(("factor", "text"), [(1.1, "+10.0 %"), (1.0, "+0.0 %"), (0.968, "-3.2 %")])
def test_times_are_compared_in_percent_of_the_prediction(factor, text):
    lines = plan_and_run_text(plan(), report(plan(), time_factor=factor), WIDE)
    for start in ("step", "forward, stage 1", "backward, stage 2"):
        assert row(lines, start).endswith(text)


def test_step_is_the_median_after_warm_up():
    planned = plan()
    measured = row(plan_and_run_text(planned, report(planned, time_factor=2.0), WIDE), "step").split()
    assert float(measured[3]) == pytest.approx(2 * float(measured[1]), rel=1e-3)
    assert "median of 3 steps after 2 warm-up steps" in run_text(report(planned), planned, WIDE)


def test_peaks_are_compared_in_percent():
    """A peak over the limit is marked in words."""
    planned = plan()
    assert row(plan_and_run_text(planned, report(planned, peak_factor=0.99), WIDE), "peak memory, stage 0").endswith(
        "-1.0 %"
    )
    text = plan_and_run_text(planned, report(planned, peak_factor=3.0), WIDE)
    assert "! OVER" in row(text, "peak memory, stage 0")
    assert row(text, "peak memory, stage 0").endswith("+200.0 %")


def test_peaks_are_compared_without_the_reserve():
    """The allocator does not hold the reserve."""
    planned = plan(reserve_bytes=20 * MIB)
    run = report(plan(), peak_factor=1.0)
    text = plan_and_run_text(planned, run, WIDE)
    assert row(text, "peak memory, stage 0").endswith("+0.0 %")
    assert "excludes the reserve of 20.0 MiB" in text


def test_peaks_of_chunks_are_compared_by_device():
    """An allocator counts all chunks of its device."""
    planned = interleaved()
    run = report(planned)
    whole = [planned.peak_bytes_by_device()[s.index % 3] for s in run.stages]
    run = replace(run, stages=tuple(replace(s, peak_bytes=b) for s, b in zip(run.stages, whole, strict=True)))
    text = plan_and_run_text(planned, run, WIDE)
    assert all(f"forward, stage {k} " in text for k in range(6))
    assert text.count("peak memory, ") == 3
    assert all(row(text, f"peak memory, device {d}").endswith("+0.0 %") for d in range(3))


def test_run_of_chunks_counts_stages_and_devices():
    planned = interleaved()
    text = run_text(report(planned), planned, WIDE)
    assert text.splitlines()[0] == "run of 5 steps on 6 stages on 3 devices"
    assert "peak memory is that of the whole device" in text
    assert "peak memory is that of the whole device" not in run_text(report(plan()), plan(), WIDE)


def test_run_on_too_few_cores_is_marked():
    planned = plan()
    run = report(planned, time_factor=11.77)
    crowded = replace(run, stages=tuple(replace(stage, core_share=0.08) for stage in run.stages))
    words = "a process of the run had a core for only 8% of the time that it needed one"
    for shown in (run_text(crowded, planned, WIDE), run_text(crowded, None, WIDE), run_section(crowded).lead):
        assert words in shown
    assert words not in run_text(run, planned, WIDE)


def test_run_without_a_plan():
    text = run_text(report(plan()), None, WIDE)
    assert "predicted" not in text
    assert "[bold]stem[/bold] … block.0" in row(text, "0 ")
    assert "loss 8.5 → 8.1" in text


def test_samples_per_second_are_the_median_after_warm_up():
    """Mini-batches may differ in size."""
    speeds = (1.0, 1.0, 200.0, 100.0, 300.0)
    assert "(200.0 samples/s)" in run_text(replace(report(plan()), samples_per_s=speeds), None, WIDE)


def test_run_with_a_plan_shows_the_comparison():
    assert plan_and_run_text(plan(), report(plan()), WIDE) in run_text(report(plan()), plan(), WIDE)


def test_run_with_other_stages_than_the_plan_is_marked():
    text = plan_and_run_text(plan(), report(plan((3, 3))), WIDE)
    assert "! the run had other stages than the plan (2, planned 3)" in text
    assert "! the run" not in plan_and_run_text(plan(), report(plan()), WIDE)


def test_run_without_steps_after_warm_up_is_shown():
    short = replace(report(plan()), step_us=(5000.0,), losses=(1.0,))
    assert "step 5.000 ms, median of 1 step with warm-up" in run_text(short, None, WIDE)
    empty = replace(report(plan()), step_us=(), losses=())
    assert "no step was timed" in run_text(empty, plan(), WIDE)


def test_peaks_of_a_v_are_compared_by_device():
    """Both ends of the chain are on the first device."""
    planned = in_a_v()
    run = report(planned)
    peaks = [row for row in compared_figures(planned, run) if row.what == "peak_bytes"]
    assert [row.predicted for row in peaks] == list(planned.peak_bytes_by_device())
    measured = [stage.peak_bytes for stage in run.stages]
    assert [row.measured for row in peaks] == [max(measured[d], measured[5 - d]) for d in range(3)]


def test_split_backwards_are_compared_if_the_plan_has_them():
    planned = in_a_v()
    run = report(planned, time_factor=1.1)
    text = plan_and_run_text(planned, run, WIDE)
    predicted = {(figure.what, figure.index): figure.predicted for figure in compared_figures(planned, run)}
    for k, stage in enumerate(planned.stages):
        assert all(row(text, f"{half} backward, stage {k} ").endswith("+10.0 %") for half in ("input", "weight"))
        passes = (predicted[what, k] for what in ("backward_input_us", "backward_weight_us"))
        assert sum(passes) == pytest.approx(stage.backward_us)
    assert run_text(run, None, WIDE).count("backward") == 3
    assert "weight backward" in run_section(run).body
    for whole in (plan_and_run_text(plan(), report(plan()), WIDE), run_text(report(plan()), None, WIDE)):
        assert "weight" not in whole
