"""The trade-off over the number of micro-batches."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from planner.core.values.plan import FrontierPoint
from planner.show.terminal.plan import plan_text
from tests.unit.show.samples import explained, plan, style

WIDE = style(120, wrap=False)


def section(planned, how=WIDE):
    """From the title on; without the reasons that follow."""
    text = plan_text(replace(planned, insight=None), (), how)
    return text[text.index("the best plan for each") :]


def rows(planned, how=WIDE):
    lines = section(planned, how).splitlines()
    rule = next(n for n, line in enumerate(lines) if line.startswith(("──", "--")))
    return lines[rule + 1 : -1]


def test_a_row_per_number_of_micro_batches():
    """Sizes, stages, step, rate, bubble, peak and recomputation of each; what does not fit says so."""
    title, *_ = section(explained()).splitlines()
    assert title == "the best plan for each number of micro-batches"
    none, two, four, _ = rows(explained())
    assert none.split() == ["1", "16", "-", "no", "plan", "fits", "-", "-", "-", "-"]
    assert none.startswith(" 1 ")
    assert two.split()[:9] == ["2", "8", "3", *two.split()[3:4], "250.0", "60.0", "%", "360", "MiB"]
    assert four.split()[:4] == ["4", "◀", "4", "3"]
    assert four.split()[5:12] == ["1,500", "10.0", "%", "60.0", "MiB", "10.0", "%"]


def test_the_chosen_one_is_marked():
    """By the same mark as the slowest stage, explained below; a plan that is not among them marks none."""
    assert [("◀" in row) for row in rows(explained())] == [False, False, True, False]
    assert section(explained()).splitlines()[-1].startswith("M micro-batches of b samples   ◀ this plan")
    other = replace(explained(), micro_batches=3)
    assert "◀" not in section(other)


def test_bars_of_the_step():
    """Bars are to scale from zero, and what takes more than four times the best runs off."""
    bars = [row.split("  ")[-1].strip() for row in rows(explained())]
    assert bars[0] == "-"
    assert bars[1] == "█" * 23 + "→"
    assert bars[2] == "█" * 6
    assert bars[3] == "█" * 9


def test_columns_go_where_there_is_no_room():
    """Step, peak, M, b and whether a plan fits stand at any width; rate, bubble and the like where there is room."""
    narrow, wide = section(explained(), style(60)), section(explained(), style(120))
    for text in (narrow, wide):
        assert "no plan fits" in text
        assert "60.0 MiB" in text
    assert "recompute" in wide
    assert "recompute" not in narrow
    assert "██" not in narrow
    assert max(map(cell_len, narrow.splitlines())) <= 60


def test_replicas_where_there_are_some():
    """A column for replicas, which also decide which row is the plan's."""
    points = [
        FrontierPoint(micro_batches=4, micro_batch_size=4 // r, replicas=r, devices=3, step_us=9e3) for r in (1, 2)
    ]
    planned = replace(plan(replicas=2), frontier=tuple(points))
    text = section(planned)
    assert "each number of micro-batches and replicas" in text
    assert "replicas  b" in text
    assert [("◀" in row) for row in rows(planned)] == [False, True]
    assert "replicas" not in section(explained())


def test_schedules_where_they_differ():
    """The schedule is told where the solver chose one, and stages are devices where chunks share them."""
    points = [
        FrontierPoint(micro_batches=m, micro_batch_size=1, schedule=schedule, devices=2, step_us=9e3)
        for m, schedule in ((2, "1f1b"), (4, "interleaved"))
    ]
    text = section(replace(plan(), frontier=tuple(points)))
    assert "schedule          devices" in text
    assert "2    1  1F1B                    2" in text
    assert "interleaved 1F1B" in text
    assert "schedule" not in section(explained())


@pytest.mark.parametrize("points", [(), (FrontierPoint(micro_batches=2, micro_batch_size=1, fits=False),)])
def test_nothing_to_weigh_up(points):
    """Without figures there is no section; where nothing fits there are no bars."""
    text = plan_text(replace(plan(), frontier=points), (), WIDE)
    assert ("the best plan for each" in text) == bool(points)
    assert "██ step" not in text
