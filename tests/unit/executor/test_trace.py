"""Tests of traces of made-up runs."""

import json

import pytest

from planner.core.cost.evaluate import Evaluation
from planner.executor.measure.trace import measured_trace_json
from tests.support.runs import STEPS, runs_of
from tests.unit.show.samples import interleaved, plan, profile


def slices(runs):
    return [event for event in json.loads(measured_trace_json(runs, 'a "title"'))["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("planned", [plan(recompute="always"), interleaved()], ids=["gpipe", "interleaved"])
def test_traces_have_a_row_per_rank(planned):
    runs = runs_of(Evaluation.of(planned, profile()))
    events = slices(runs)
    assert {event["pid"] for event in events} == set(range(planned.num_devices))
    forwards = [event for event in events if event["cat"] == "forward"]
    assert len(forwards) == STEPS * planned.micro_batches * len(planned.stages)
    chunk = f".{planned.chunks - 1}" if planned.chunks > 1 else ""
    assert any(event["name"] == f"F0{chunk}" and event["args"]["stage"] >= 0 for event in forwards)
    assert min(event["ts"] for event in events) == 0


def test_traces_of_replicas_are_separate():
    planned = plan(recompute="always")
    one = runs_of(Evaluation.of(planned, profile()))
    other = [run._replace(rank=run.rank + len(one), replica=1) for run in one]
    events = slices([*one, *other])
    assert len(events) == 2 * len(slices(one))
    assert {e["pid"] for e in events} == set(range(2 * len(one)))


def test_traces_without_steps_have_empty_rows():
    planned = plan()
    runs = runs_of(Evaluation.of(planned, profile()))
    assert slices([run._replace(steps=()) for run in runs]) == []
