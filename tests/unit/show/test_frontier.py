"""Trade-off over the number of micro-batches."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from planner.core.values.plan import FrontierPoint
from planner.show.terminal.plan import plan_text
from tests.unit.show.samples import explained, plan, style

WIDE = style(120, wrap=False)


def section(planned, how=WIDE):
    """Return the text from the section's title to its end, without the explanation."""
    text = plan_text(replace(planned, insight=None), (), how)
    return text[text.index("the best plan for each") :]


def rows(planned, how=WIDE):
    lines = section(planned, how).splitlines()
    rule = next(n for n, line in enumerate(lines) if line.startswith(("──", "--")))
    return lines[rule + 1 : -1]


def test_trade_off_has_a_row_for_each_number_of_micro_batches():
    title, *_ = section(explained()).splitlines()
    assert title == "the best plan for each number of micro-batches"
    none, two, four, _ = rows(explained())
    assert none.split() == ["1", "16", "-", "no", "plan", "fits", "-", "-", "-", "-"]
    assert none.startswith(" 1 ")
    assert two.split()[:9] == ["2", "8", "3", *two.split()[3:4], "250.0", "60.0", "%", "360", "MiB"]
    assert four.split()[:4] == ["4", "◀", "4", "3"]
    assert four.split()[5:12] == ["1,500", "10.0", "%", "60.0", "MiB", "10.0", "%"]


def test_row_of_the_plan_is_marked():
    """A plan that is not in the table marks no row."""
    assert [("◀" in row) for row in rows(explained())] == [False, False, True, False]
    assert section(explained()).splitlines()[-1].startswith("M micro-batches of b samples   ◀ this plan")
    other = replace(explained(), micro_batches=3)
    assert "◀" not in section(other)


def test_step_bars_are_to_scale():
    """Bars longer than four times the best are cut."""
    bars = [row.split("  ")[-1].strip() for row in rows(explained())]
    assert bars[0] == "-"
    assert bars[1] == "█" * 23 + "→"
    assert bars[2] == "█" * 6
    assert bars[3] == "█" * 9


def test_narrow_terminals_drop_less_important_columns():
    narrow, wide = section(explained(), style(60)), section(explained(), style(120))
    for text in (narrow, wide):
        assert "no plan fits" in text
        assert "60.0 MiB" in text
    assert "recompute" in wide
    assert "recompute" not in narrow
    assert "██" not in narrow
    assert max(map(cell_len, narrow.splitlines())) <= 60


def test_replicas_have_a_column_if_they_vary():
    points = [
        FrontierPoint(micro_batches=4, micro_batch_size=4 // r, replicas=r, devices=3, step_us=9e3) for r in (1, 2)
    ]
    planned = replace(plan(replicas=2), frontier=tuple(points))
    text = section(planned)
    assert "each number of micro-batches and replicas" in text
    assert "replicas  b" in text
    assert [("◀" in row) for row in rows(planned)] == [False, True]
    assert "replicas" not in section(explained())


def test_schedules_have_a_column_if_they_vary():
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
def test_trade_off_without_figures_or_fitting_plans(points):
    text = plan_text(replace(plan(), frontier=points), (), WIDE)
    assert ("the best plan for each" in text) == bool(points)
    assert "██ step" not in text
