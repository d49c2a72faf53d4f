"""Memory over time: its highest levels, and its pictures in the report."""

import re

import pytest

from planner.show.html import plan_html
from planner.show.step import MemoryLevel, StepTimeline, memory_over_time
from tests.unit.show.samples import in_a_v, interleaved, plan, profile, step_of_sample


def levels_of(*levels):
    return StepTimeline(
        num_devices=1, chunks=1, micro_batches=1, spans=(), memory=(tuple(MemoryLevel(*pair) for pair in levels),)
    )


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


def test_report_draws_memory_over_time():
    """The pictures have labels for screen readers."""
    planned = in_a_v()
    page = plan_html(planned, profile(), step_of_sample(planned), None, digest="sha256:1")
    assert len(re.findall(r'aria-label="device \d: at most [^"]+ of 120 MiB"', page)) == 3
    assert "at most" not in plan_html(planned, None, None, None, digest="sha256:1")
