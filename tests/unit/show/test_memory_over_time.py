"""Memory over time: scale, peaks and limits."""

import re

import pytest

from planner.show.html import plan_html
from planner.show.step import MemoryLevel, StepTimeline, memory_over_time
from tests.unit.show.samples import MIB, in_a_v, interleaved, plan, profile, step_of_sample, style, whole_plan_text


def levels_of(*levels):
    return StepTimeline(
        num_devices=1, chunks=1, micro_batches=1, spans=(), memory=(tuple(MemoryLevel(*pair) for pair in levels),)
    )


def rows(text):
    """Return the rows of the section without the names of devices."""
    section = text[text.index("memory over the step") :]
    return [line.split(" ", 2)[2] for line in section.splitlines()[1:] if line.startswith(("device ", "stage "))]


def test_column_has_the_highest_of_its_levels():
    step = levels_of((0.0, 1), (2.0, 5), (4.0, 2), (6.2, 9), (6.3, 2), (8.0, 3))
    assert memory_over_time(step, columns=5, end_us=10.0) == [[1, 5, 2, 9, 3]]
    assert memory_over_time(step, columns=2, end_us=10.0) == [[5, 9]]


def test_levels_after_the_end_are_omitted():
    """The optimizer step follows the last backward."""
    assert memory_over_time(levels_of((0.0, 1), (10.0, 7)), columns=2, end_us=10.0) == [[1, 1]]


@pytest.mark.parametrize("planned", [plan(), interleaved(), in_a_v()], ids=["gpipe", "interleaved", "zbv"])
def test_highest_level_is_the_peak(planned):
    step = step_of_sample(planned)
    held = memory_over_time(step, columns=100, end_us=step.end_us)
    assert [max(levels) for levels in held] == pytest.approx(planned.peak_bytes_by_device(), abs=8)


def test_memory_rows_have_the_scale_of_the_timeline():
    planned = in_a_v()
    text = whole_plan_text(planned, style(100))
    drawn = rows(text)
    assert len(drawn) == 3
    shares = [f"{100 * need / (120 * MIB):.0f} %" for need in planned.peak_bytes_by_device()]
    assert [row.rsplit("  ", 1)[1].strip() for row in drawn] == shares
    assert all(re.fullmatch(r"[▁▂▃▄▅▆▇]{84} +\d+ %", row) for row in drawn)


def test_memory_at_its_limit_fills_the_row():
    """If all needs are far below their limits, the largest need fills the row."""
    need = max(in_a_v().peak_bytes_by_device())
    assert "█" in "".join(rows(whole_plan_text(in_a_v(cap=need), style(100))))
    far = whole_plan_text(in_a_v(cap=100 * need), style(100))
    assert "up to the largest need" in far
    assert "█" in "".join(rows(far))


def test_report_draws_memory_over_time():
    """The pictures have labels for screen readers."""
    planned = in_a_v()
    page = plan_html(planned, profile(), step_of_sample(planned), None, digest="sha256:1")
    assert len(re.findall(r'aria-label="device \d: at most [^"]+ of 120 MiB"', page)) == 3
    assert "at most" not in plan_html(planned, None, None, None, digest="sha256:1")
