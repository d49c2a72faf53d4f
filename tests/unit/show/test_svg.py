"""Timeline as SVG: well-formed, to scale, limited in size, with escaped text."""

import re
from xml.etree import ElementTree as ET

import pytest

from planner.show.markup import escape_text, number
from planner.show.svg import legend_entries, timeline_svg
from tests.unit.show.samples import interleaved, plan, step_of_sample

SVG = "{http://www.w3.org/2000/svg}"


def picture(planned):
    return ET.fromstring(timeline_svg(step_of_sample(planned), "a <title> & more"))


def segments(row, look):
    found = [path.get("d") for path in row.iter(f"{SVG}path") if path.get("class") == look]
    return [tuple(map(float, part)) for d in found for part in re.findall(r"M([\d.]+) 0h([\d.]+)", d)]


def rows(root):
    return [g for g in root.iter(f"{SVG}g") if g.get("class") == "row"]


@pytest.mark.parametrize("planned", [plan(), plan(recompute="always"), interleaved(), plan((6,))])
def test_svg_is_well_formed(planned):
    """The title is also a label for screen readers."""
    root = picture(planned)
    assert root.tag == f"{SVG}svg"
    assert root.get("aria-label") == root.find(f"{SVG}title").text == "a <title> & more"
    assert len(rows(root)) == planned.num_devices


def test_svg_boxes_are_to_scale():
    planned = plan()
    step = step_of_sample(planned)
    drawn = [segments(row, "f0") for row in rows(picture(planned))]
    assert [len(boxes) for boxes in drawn] == [planned.micro_batches] * 3
    forwards = [s for s in step.spans if s.device == 0 and s.kind == "forward"]
    scale = (drawn[0][-1][0] - drawn[0][0][0]) / (forwards[-1].start_us - forwards[0].start_us)
    for stage in range(3):
        starts = [s.start_us for s in step.spans if s.device == stage and s.kind == "forward"]
        for (x, _), start in zip(drawn[stage], starts, strict=True):
            assert x - drawn[0][0][0] == pytest.approx(start * scale, abs=0.05)


def test_svg_boxes_are_numbered_if_there_is_room():
    texts = {text.text for text in picture(plan()).iter(f"{SVG}text")}
    assert {"F0", "F3", "B0", "B3", "stage 0"} <= texts
    texts = {text.text for text in picture(interleaved()).iter(f"{SVG}text")}
    assert {"B5.1", "device 2"} <= texts


def test_svg_legend_lists_only_drawn_kinds():
    assert "again" not in dict(legend_entries(step_of_sample(plan())))
    assert "again" in dict(legend_entries(step_of_sample(plan(recompute="always"))))
    assert {"f1", "b1"} <= set(dict(legend_entries(step_of_sample(interleaved()))))


@pytest.mark.slow
def test_svg_of_thousands_of_boxes_is_small():
    many = timeline_svg(step_of_sample(plan(micro_batches=5000)), "many")
    assert len(many) < 100_000


def test_same_plan_gives_the_same_svg():
    assert timeline_svg(step_of_sample(plan()), "t") == timeline_svg(step_of_sample(plan()), "t")


def test_svg_text_is_escaped():
    assert escape_text('<b a="x">\'&\x1b\u202e\x00') == "&lt;b a=&quot;x&quot;&gt;&#x27;&amp;\\x1b\\u202e\\x00"
    assert [number(12.50), number(3.0), number(-0.001), number(100.0, 0)] == [
        "12.5",
        "3",
        "0",
        "100",
    ]
