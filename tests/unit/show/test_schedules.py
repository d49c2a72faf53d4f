"""Trade-off over schedules, in the terminal and in the report."""

import re
from dataclasses import replace

from planner.show.html import plan_html
from planner.show.terminal.plan import plan_text
from tests.unit.show.samples import compared_schedules, in_a_v, profile, step_of_sample, style


def lines():
    text = plan_text(compared_schedules(), (), style(100))
    return text[text.index("best plan of each schedule") :].splitlines()


def test_schedules_have_a_row_each():
    rows = {re.split(r" {2,}", line)[0]: line.split() for line in lines()}
    assert rows["GPipe"][-8:] == ["40.00", "30.0", "%", "100", "MiB", "83", "%", "yes"]
    assert rows["ZB-V ◀"][-1] == "yes"
    assert {"none", "found", "unknown"} <= set(rows["V-Min"])


def test_schedules_that_were_not_tried_are_listed():
    (remark,) = [line for line in lines() if line.startswith("not tried")]
    words = " ".join(lines()[lines().index(remark) :])
    assert "ZB-H1" in words
    assert "DualPipeV" in words
    assert "V-Min" not in words


def test_report_has_a_table_of_schedules():
    planned = compared_schedules()
    page = plan_html(planned, profile(), step_of_sample(planned), None, digest="sha256:1")
    section = page[page.index('<section id="schedules"') :]
    section = section[: section.index("</section>")]
    assert "ZB-V ◆" in section
    assert "60.0 MiB" in section
    assert "none found" in section
    bare = plan_html(in_a_v(), profile(), step_of_sample(in_a_v()), None, digest="sha256:1")
    assert 'id="schedules"' not in bare


def test_times_are_aligned_if_one_has_a_mark():
    planned = compared_schedules()
    short = replace(planned.schedules[0], short_search=True)
    text = plan_text(replace(planned, schedules=(short, *planned.schedules[1:])), (), style(120))
    table = text[text.index("best plan of each schedule") :].splitlines()
    marked, other = (next(line for line in table if time in line) for time in ("40.00 *", "39.00"))
    assert marked.index("40.00") == other.index("39.00")
