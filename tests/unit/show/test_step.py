"""Simulated step: events with recomputation, and memory whose highest level is the peak."""

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.values.cluster import Link
from planner.show.step import simulated_step
from tests.support.chains import random_profile
from tests.unit.show.samples import interleaved, plan, profile, step_of_sample, unlike

PLANS = [
    *(
        pytest.param(plan(schedule=schedule, recompute=recompute, micro_batches=m), id=f"{schedule}-{recompute}-{m}")
        for schedule in ("gpipe", "1f1b")
        for recompute in ("never", "except-last", "always")
        for m in (3, 7)
    ),
    pytest.param(plan((6,), micro_batches=1), id="one stage"),
    pytest.param(plan(recomputed=((0,), (2, 3), (4, 5))), id="layers"),
    pytest.param(plan(reserve_bytes=12345), id="reserve"),
    pytest.param(unlike(), id="unlike devices"),
    pytest.param(interleaved(), id="interleaved"),
]


@pytest.mark.parametrize("planned", PLANS)
def test_highest_memory_level_is_the_peak_of_the_plan(planned):
    step = step_of_sample(planned)
    assert tuple(max(level.bytes for level in levels) for levels in step.memory) == planned.peak_bytes_by_device()


@pytest.mark.parametrize("planned", PLANS)
def test_memory_levels_are_sorted_by_time(planned):
    for levels in step_of_sample(planned).memory:
        times = [level.start_us for level in levels]
        assert times[0] == 0.0
        assert times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_highest_memory_level_with_exact_records_is_the_peak(seed, recompute, schedule):
    """With exact records, the first backward is a separate point in the step."""
    measured = random_profile(seed, 6, exact=True)
    assert costs_at(measured, 1).exact
    for micro_batches in (3, 5):
        planned = plan(schedule=schedule, recompute=recompute, micro_batches=micro_batches, of=measured)
        evaluation = Evaluation.of(planned, measured)
        step = simulated_step(evaluation)
        assert tuple(max(level.bytes for level in levels) for levels in step.memory) == planned.peak_bytes_by_device()
        # Replicas' gradients in a message are there in the last backward, and may be more than was there before.
        evaluation = replace(evaluation, partition=replace(evaluation.partition, replicas=2))
        highest = [max(level.bytes for level in levels) for levels in simulated_step(evaluation).memory]
        assert highest == [memory.total for memory in evaluation.memory]


def test_only_backwards_have_recomputation():
    planned = plan(recompute="except-last")
    for span in step_of_sample(planned).spans:
        stage = planned.stages[span.stage]
        again = span.kind == "backward" and span.micro_batch != planned.micro_batches - 1
        assert span.recompute_us == pytest.approx(stage.forward_us if again else 0.0)


def test_blocking_links_occupy_the_receiver():
    planned = plan()
    link = Link(latency_us=10.0, bytes_per_s=1e9, blocking=True)
    planned = replace(planned, inputs=replace(planned.inputs, link=link))
    spans = step_of_sample(planned).spans
    kinds = {span.kind for span in spans}
    assert "receive" in kinds
    assert not {"send forward", "send backward"} & kinds
    for device in range(planned.num_devices):
        mine = sorted((s for s in spans if s.device == device), key=lambda s: s.start_us)
        assert all(a.end_us <= b.start_us + 1e-6 for a, b in pairwise(mine))


def test_optimizer_follows_the_last_backward():
    measured = profile()
    measured = replace(measured, layers=tuple(replace(layer, optimizer_us=50.0) for layer in measured.layers))
    planned = plan(of=measured)
    step = simulated_step(Evaluation.of(planned, measured))
    steps = [span for span in step.spans if span.kind == "optimizer"]
    assert [span.duration_us for span in steps] == pytest.approx([100.0] * 3)
    for span in steps:
        assert span.start_us == max(s.end_us for s in step.spans if s.kind == "backward" and s.device == span.device)
    assert step.end_us == step.pipeline_us + 100.0
