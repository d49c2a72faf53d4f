"""Memory over time: to scale, no peak lost, against the cap."""

import re

import pytest

from planner.show.html import plan_html
from planner.show.step import MemoryLevel, Step
from planner.show.views.memory_over_time import memory_over_time
from tests.unit.show.samples import MIB, in_a_v, interleaved, plan, profile, step_of_sample, style, whole_plan_text


def levels_of(*levels):
    return Step(
        num_devices=1, chunks=1, micro_batches=1, spans=(), memory=(tuple(MemoryLevel(*pair) for pair in levels),)
    )


def rows(text):
    """The rows of the section, without the names of devices."""
    section = text[text.index("memory over the step") :]
    return [line.split(" ", 2)[2] for line in section.splitlines()[1:] if line.startswith(("device ", "stage "))]


def test_a_column_has_the_highest_of_its_levels():
    """However short a peak is, and whether it ends within its column or at its edge."""
    step = levels_of((0.0, 1), (2.0, 5), (4.0, 2), (6.2, 9), (6.3, 2), (8.0, 3))
    assert memory_over_time(step, columns=5, end_us=10.0) == [[1, 5, 2, 9, 3]]
    assert memory_over_time(step, columns=2, end_us=10.0) == [[5, 9]]


def test_what_follows_the_end_is_left_out():
    """The optimizer's step is behind the last backward."""
    assert memory_over_time(levels_of((0.0, 1), (10.0, 7)), columns=2, end_us=10.0) == [[1, 1]]


@pytest.mark.parametrize("planned", [plan(), interleaved(), in_a_v()], ids=["gpipe", "interleaved", "zbv"])
def test_the_highest_level_is_the_peak(planned):
    """Of every device, under every schedule."""
    step = step_of_sample(planned)
    held = memory_over_time(step, columns=100, end_us=step.end_us)
    assert [max(levels) for levels in held] == pytest.approx(planned.device_bytes(), abs=8)


def test_rows_stand_under_the_timeline():
    """A row per device on the timeline's scale of time, its peak's share of the cap behind it."""
    planned = in_a_v()
    text = whole_plan_text(planned, style(100))
    drawn = rows(text)
    assert len(drawn) == 3
    shares = [f"{100 * need / (120 * MIB):.0f} %" for need in planned.device_bytes()]
    assert [row.rsplit("  ", 1)[1].strip() for row in drawn] == shares
    assert all(re.fullmatch(r"[▁▂▃▄▅▆▇]{84} +\d+ %", row) for row in drawn)


def test_only_what_fills_its_cap_looks_full():
    """A device whose cap is its peak reaches the top where it has its peak; under tiny needs the largest is the top."""
    need = max(in_a_v().device_bytes())
    assert "█" in "".join(rows(whole_plan_text(in_a_v(cap=need), style(100))))
    far = whole_plan_text(in_a_v(cap=100 * need), style(100))
    assert "up to the largest need" in far
    assert "█" in "".join(rows(far))


def test_the_report_draws_it_too():
    """A picture per device, which says its peak and its cap to whom cannot see it; none without the profile."""
    planned = in_a_v()
    page = plan_html(planned, profile(), step_of_sample(planned), None, digest="sha256:1")
    assert len(re.findall(r'aria-label="device \d: at most [^"]+ of 120 MiB"', page)) == 3
    assert "at most" not in plan_html(planned, None, None, None, digest="sha256:1")
