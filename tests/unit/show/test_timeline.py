"""Timeline: scale, no overlaps, and legibility with and without numbers."""

import re
from itertools import pairwise

import pytest

from planner.core.cost.simulate import Event, StageTimes, simulate
from planner.core.schedule import KINDS, SCHEDULES
from planner.show.terminal.timeline import AxisScale, boxes_of, idle_share
from tests.unit.show.samples import equal_stages, events_of, in_a_v, plan, style, timeline_text


def rows(text):
    """Return the text after each device's label, without its bubble."""
    drawn = [line.split(" ", 2)[2] for line in text.splitlines() if line.startswith(("stage ", "device "))]
    return [row[: -len(" 17.9 %")].rstrip() for row in drawn]


def bubbles(text):
    """Return the end of each device's row."""
    drawn = [line for line in text.splitlines() if line.startswith(("stage ", "device "))]
    return [line[-len("17.9 %") :] for line in drawn]


def uneven(num_stages=4, micro_batches=6):
    times = tuple(
        StageTimes(forward_us=700.0 + 130 * k, backward_us=1900.0 - 210 * k, last_backward_us=900.0, send_us=90.0)
        for k in range(num_stages)
    )
    return simulate(SCHEDULES["gpipe"].actions(num_stages, micro_batches), times)


def interleaved(num_devices, micro_batches, chunks, *, forward_us=6000.0):
    """Return events of equal stages without links; a backward takes as long as a forward."""
    times = StageTimes(forward_us=forward_us, backward_us=forward_us, last_backward_us=forward_us)
    actions = SCHEDULES["interleaved"].actions(num_devices, micro_batches, chunks)
    return simulate(actions, (times,) * (num_devices * chunks))


def test_idle_share_of_equal_stages():
    assert idle_share(equal_stages(8, 32), 8) == pytest.approx(7 / 39)
    assert "blank: idle 17.9 %" in timeline_text(equal_stages(8, 32), 8, style())


def test_blank_columns_equal_the_idle_share():
    drawn = rows(timeline_text(equal_stages(8, 32), 8, style(1000)))
    columns = max(map(len, drawn))
    filled = sum(len(row.replace(" ", "")) for row in drawn)
    assert 1 - filled / (8 * columns) == pytest.approx(7 / 39, abs=2 / columns)


@pytest.mark.parametrize("columns", [20, 52, 76, 112, 500])
def test_boxes_are_to_scale_and_do_not_overlap(columns):
    events = uneven()
    scale = AxisScale(total_us=max(e.end_us for e in events), columns=columns)
    for stage in range(4):
        boxes = boxes_of(events, stage, scale, 4)
        mine = sorted((e for e in events if e.stage == stage and len(e.kind) == 1), key=lambda e: e.start_us)
        assert [(b.kind, b.micro_batch) for b in boxes] == [(e.kind, e.micro_batch) for e in mine]
        for box, event in zip(boxes, mine, strict=True):
            assert abs(box.start - event.start_us * columns / scale.total_us) <= 0.5
            assert abs(box.end - event.end_us * columns / scale.total_us) <= 0.5
            assert 0 <= box.start <= box.end <= columns
        assert all(left.end <= right.start for left, right in pairwise(boxes))


def test_timeline_by_hand():
    """K = 2, M = 2, in columns of exactly one millisecond."""
    events = equal_stages(2, 2, forward_us=6000.0)
    text = timeline_text(events, 2, style(8 + 54 + 7))
    assert rows(text) == [
        "F0░░░░F1░░░░" + " " * 18 + "B0▓▓▓▓▓▓▓▓▓▓B1▓▓▓▓▓▓▓▓▓▓",
        " " * 6 + "F0░░░░F1░░░░B0▓▓▓▓▓▓▓▓▓▓B1▓▓▓▓▓▓▓▓▓▓",
    ]
    axis = text.splitlines()[3:5]
    assert axis == [
        "        ├─────────┼─────────┼─────────┼─────────┼─────────┼───",
        "     ms 0         10        20        30        40        50",
    ]


def test_interleaved_timeline_by_hand():
    """K = 2, M = 2, V = 2, in columns of exactly one millisecond: a row per device, chunks told apart."""
    text = timeline_text(interleaved(2, 2, 2), 2, style(9 + 60 + 7))
    title, first, second, *_ = text.splitlines()
    assert title == "timeline of one step, 60.0 ms up to the last backward"
    assert (first[:9], second[:9]) == ("device 0 ", "device 1 ")
    assert rows(text) == [
        "F0.0░░F1.0░░F0.1▒▒F1.1▒▒" + " " * 6 + "B0.1██" + " " * 6 + "B1.1██B0.0▓▓B1.0▓▓",
        " " * 6 + "F0.0░░F1.0░░F0.1▒▒B0.1██F1.1▒▒B1.1██B0.0▓▓B1.0▓▓",
    ]
    assert "F▒▒B██ chunk 1\nnumber: micro-batch.chunk" in text
    assert "blank: idle 20.0 %" in text


def test_boxes_of_chunks_are_numbered_all_or_not_at_all():
    scale = AxisScale(total_us=40.0, columns=30)
    boxes = boxes_of(interleaved(2, 2, 2, forward_us=4.0), 0, scale, 2)
    assert {box.columns for box in boxes} == {3}
    drawn = rows(timeline_text(interleaved(2, 2, 2), 2, style(60 + 7)))
    assert all(re.fullmatch(r"( *([FB]\d\.\d)[░▒▓█]+)+", row) for row in drawn)
    narrow = timeline_text(interleaved(4, 8, 2), 4, style(84))
    assert not re.search(r"[FB]\d", narrow)
    assert "number:" not in narrow


def test_boxes_without_room_for_the_chunk_show_the_micro_batch():
    text = timeline_text(interleaved(2, 4, 2), 2, style(9 + 54 + 7))
    assert all(re.fullmatch(r"( *([FB]\d)[░▒▓█]+)+", row) for row in rows(text))
    assert "number: micro-batch " in text
    chunks = interleaved(1, 1, 3)
    (row,) = rows(timeline_text(chunks, 1, style(9 + 60 + 7)))
    assert [fill for fill, _ in re.findall(r"((\W)\2)\2*", row)] == ["░░", "▒▒", "░░", "▓▓", "██", "▓▓"]


def test_chunks_have_their_own_colors():
    painted = timeline_text(interleaved(2, 2, 2), 2, style(120, color=True))
    papers = {name: paper for paper, name in re.findall(r"48;5;(\d+)m([FB]\d\.\d)", painted)}
    assert len({papers[name] for name in ("F0.0", "F0.1", "B0.0", "B0.1")}) == 4
    assert "chunk 1" in painted
    assert "F▒▒B██ chunk 1" in timeline_text(interleaved(2, 2, 2), 2, style(120))
    many = timeline_text(interleaved(1, 2, 6), 1, style(240, color=True))
    assert "F1.5" in many


def test_narrow_timeline_has_no_numbers():
    text = timeline_text(equal_stages(8, 32), 8, style(84))
    drawn = rows(text)
    assert len(drawn) == 8
    assert all(re.fullmatch(r" *░+ *▓+", row) for row in drawn)
    assert "number:" not in text


def test_wide_timeline_has_numbers():
    drawn = rows(timeline_text(equal_stages(8, 32), 8, style(240)))
    assert all(re.findall(r"B(\d+)", row) == [str(n) for n in range(32)] for row in drawn)


def test_timeline_omits_transfers():
    events = events_of(plan())
    assert any(event.kind == "send F" for event in events)
    computing = [event for event in events if event.kind in {"F", "B"}]
    assert timeline_text(events, 3, style()) == timeline_text(computing, 3, style())


def test_axis_labels_do_not_touch():
    for total_us in (3.0, 42.0, 999.0, 1e4, 123_456.0, 7e6, 3e9):
        for width in range(60, 130, 7):
            events = [Event(kind="F", stage=0, device=0, micro_batch=0, start_us=0.0, end_us=total_us)]
            labels = timeline_text(events, 1, style(width)).splitlines()[3].split()[1:]
            ticks = [float(label) for label in labels]
            assert ticks[0] == 0
            assert len(ticks) >= 2
            gaps = [right - left for left, right in pairwise(ticks)]
            assert gaps == pytest.approx([gaps[0]] * len(gaps))


def test_step_without_time_is_not_drawn():
    assert "nothing takes any time" in timeline_text((), 2, style())
    still = [Event(kind="F", stage=0, device=0, micro_batch=0, start_us=0.0, end_us=0.0)]
    assert "nothing takes any time" in timeline_text(still, 1, style())


def test_rows_end_with_the_bubble_of_the_device():
    """K = 2, M = 2, F = 6, B = 12: the first stage waits for the backward of the last, the last for nothing."""
    text = timeline_text(equal_stages(2, 2, forward_us=6000.0), 2, style(80))
    assert bubbles(text) == ["33.3 %", " 0.0 %"]
    assert "bubble, from a row's first box to its last" in text


def test_split_backwards_and_chunks_have_different_fills():
    planned = in_a_v()
    text = timeline_text(events_of(planned), 3, style(240))
    fills = {(kind, chunk): fill for kind, chunk, fill in re.findall(r"([FIW])\d\.([01])(\S)", text)}
    assert len(fills) == len(set(fills.values())) == 6
    assert "input backward with any recomputation" in text
    assert "weight backward" in text
    assert "overlaps with the next step" in text
    assert "blank: idle  " in text  # without a share, which would not be the plan's bubble


def test_split_backwards_have_their_own_colors():
    papers = [paper for kind in KINDS.values() for hue in kind.terminal for paper in hue]
    assert len(papers) == len(set(papers))
    hues = [paper for kind in KINDS.values() for paper in kind.paper]
    assert len(hues) == len(set(hues))
