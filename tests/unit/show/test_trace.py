"""Trace: nested slices, durations, and memory counters."""

import json
from collections import defaultdict

import pytest

from planner.show.trace import predicted_trace_json
from tests.unit.show.samples import interleaved, plan, step_of_sample

PLANS = pytest.mark.parametrize(
    "planned",
    [plan(recompute="always"), plan(schedule="1f1b", recompute="except-last"), interleaved()],
    ids=["gpipe", "1f1b", "interleaved"],
)


def events(planned):
    return json.loads(predicted_trace_json(step_of_sample(planned), "a <title>"))["traceEvents"]


def slices(planned):
    return [event for event in events(planned) if event["ph"] == "X"]


@PLANS
def test_slices_of_a_thread_nest(planned):
    threads = defaultdict(list)
    for event in slices(planned):
        threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for found in threads.values():
        open_ends = []
        for start, minus in sorted(found):
            end = round(start - minus, 3)
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


@PLANS
def test_slice_durations_equal_the_stage_times(planned):
    for device in range(planned.num_devices):
        stages = planned.stages[device :: planned.num_devices]
        mine = [event for event in slices(planned) if event["pid"] == device]
        forward = sum(event["dur"] for event in mine if event["cat"] == "forward")
        assert forward == pytest.approx(planned.micro_batches * sum(s.forward_us for s in stages), rel=1e-6)
        backward = sum(event["dur"] for event in mine if event["cat"] == "backward")
        spared = sum(s.forward_us for s in stages if s.recompute == "except-last")
        most = planned.micro_batches * sum(s.backward_us for s in stages)
        assert backward == pytest.approx(most - spared, rel=1e-6)


@PLANS
def test_highest_counter_is_the_peak(planned):
    peaks = defaultdict(int)
    for event in events(planned):
        if event["ph"] == "C":
            assert event["name"] == "memory"
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["bytes"])
    assert tuple(peaks[device] for device in range(planned.num_devices)) == planned.peak_bytes_by_device()


@PLANS
def test_every_process_and_thread_has_a_name(planned):
    named = {(e["pid"], e["tid"]) for e in events(planned) if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices(planned)} <= named
    processes = {e["pid"]: e["args"]["name"] for e in events(planned) if e["name"] == "process_name"}
    called = "stage" if planned.chunks == 1 else "device"
    assert processes == {d: f"{called} {d}" for d in range(planned.num_devices)}


def test_slice_names_include_the_chunk():
    assert {"F0.0", "F0.1", "B5.1"} <= {event["name"] for event in slices(interleaved())}


def test_same_plan_gives_the_same_trace():
    assert predicted_trace_json(step_of_sample(plan()), "t") == predicted_trace_json(step_of_sample(plan()), "t")
