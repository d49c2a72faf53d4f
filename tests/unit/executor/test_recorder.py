"""What a run took: warm-up left out, memory from the second step, peaks of the allocator."""

import time
from itertools import count
from typing import Literal

import pytest
import torch
from torch import Tensor

from planner.device.machine import CoreTime, core_time
from planner.device.meter import CpuMeter
from planner.executor.measure.recorder import WARM_UP_STEPS, Recorder

CPU = torch.device("cpu")


@pytest.fixture
def recorder() -> "Recorder":
    """Closed by the tests that do not take it through its warm-up."""
    return Recorder(CPU)


def step(recorder: Recorder, kept: list[Tensor] | None = None, *, size: int = 0) -> None:
    """One step: forward, backward, and `size` bytes that come and go."""
    with recorder.step():
        recorder.timed("forward", lambda: time.sleep(0.001))
        recorder.timed("backward", lambda: time.sleep(0.02))
        if size:
            temporary = torch.empty(size, dtype=torch.uint8)
            del temporary
        if kept is not None:
            kept.append(torch.empty(1000, dtype=torch.uint8))


def test_results_are_handed_on(recorder: Recorder) -> None:
    """`timed` returns what the work returns."""
    assert recorder.timed("forward", lambda: 42) == 42
    recorder.close()


def test_warm_up_steps_are_left_out_of_times(recorder: Recorder) -> None:
    """Of the times per stage, not of the list of step times."""
    for _ in range(WARM_UP_STEPS):
        step(recorder)
    assert recorder.typical_us("forward") == 0.0
    for _ in range(3):
        step(recorder)
    assert len(recorder.step_us) == WARM_UP_STEPS + 3
    assert 1000 <= recorder.typical_us("forward") <= recorder.typical_us("backward")
    assert all(time_us >= 3000 for time_us in recorder.step_us)


def test_spans_lie_where_the_clock_says(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the process is kept from running between any two readings: processes are compared by this clock."""
    readings_ns = count(step=10**6)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(readings_ns))
    with recorder.step():
        within_ns = recorder.timed("forward", time.perf_counter_ns)
    (span,) = recorder.steps[0].spans
    assert span.start_ns < within_ns < span.end_ns
    recorder.close()


def test_the_typical_time_is_the_median(recorder: Recorder) -> None:
    """One slow micro-batch does not count."""
    for _ in range(WARM_UP_STEPS):
        step(recorder)
    with recorder.step():
        for n, seconds in enumerate((0.001, 0.001, 0.2)):
            recorder.timed("forward", lambda s=seconds: time.sleep(s), micro_batch=n)  # type: ignore[misc]
    assert 1000 <= recorder.typical_us("forward") < 200_000


@pytest.mark.skipif(not core_time().ran_ns, reason="the system does not tell how long a thread waits for a core")
def test_the_share_of_a_core_is_told_behind_the_warm_up(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time that the thread wanted to run: sleeping does not count."""
    for _ in range(WARM_UP_STEPS):
        step(recorder)
    assert recorder.core_share == 0.0
    step(recorder)
    assert 0.0 < recorder.core_share <= 1.0
    monkeypatch.setattr("planner.executor.measure.recorder.core_time", lambda: CoreTime(10**18, 10**18))
    step(recorder)
    assert recorder.core_share == pytest.approx(0.5)


def test_memory_counts_from_the_beginning() -> None:
    """What was made before the first step and lives on is part of the peak; what went is not."""
    recorder = Recorder(CPU)
    gone = torch.empty(50_000, dtype=torch.uint8)
    model = torch.empty(10_000, dtype=torch.uint8)
    del gone
    kept: list[Tensor] = []
    for size in (700_000, 5000, 900_000, 900_000):
        step(recorder, kept, size=size)
    # Second step: 10,000 + 1000 from the first step + 5000.
    assert recorder.peak.tensor_bytes == 16_000
    del model


def test_the_first_step_does_not_count_for_memory() -> None:
    """Before it the optimizer has no state."""
    recorder = Recorder(CPU)
    step(recorder, size=1_000_000)
    step(recorder, size=100)
    assert recorder.peak.tensor_bytes == 100


def test_recording_ends_with_the_warm_up() -> None:
    """Then the allocator is free for others, and steps are not slowed down."""
    recorder = Recorder(CPU)
    for _ in range(WARM_UP_STEPS):
        step(recorder)
    assert CpuMeter().measure(lambda: None).peak_bytes == 0
    step(recorder)
    recorder.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_closing_early_is_fine(steps: int) -> None:
    """A run may be shorter than the warm-up; closing twice changes nothing."""
    recorder = Recorder(CPU)
    for _ in range(steps):
        step(recorder)
    recorder.close()
    recorder.close()
    assert CpuMeter().measure(lambda: None).peak_bytes == 0
    assert len(recorder.step_us) == steps


def test_a_run_of_one_step_has_a_peak_too() -> None:
    """Not zero, which would read as "needs nothing"."""
    recorder = Recorder(CPU)
    step(recorder, size=5000)
    recorder.close()
    assert recorder.peak.tensor_bytes >= 5000


@pytest.mark.parametrize("kind", ["backward", "input backward"])
def test_recomputation_lies_in_its_backward(recorder: Recorder, kind: Literal["backward", "input backward"]) -> None:
    """What may be recomputation is noted only while a backward is timed, with that one's micro-batch."""
    with recorder.step():
        recorder.timed("forward", lambda: recorder.timed_recomputation(lambda: 1, stage=2), stage=2, micro_batch=3)
        assert (
            recorder.timed(kind, lambda: recorder.timed_recomputation(lambda: 7, stage=2), stage=2, micro_batch=3) == 7
        )
        with recorder.optimizer(stage=2):
            pass
    recorder.close()
    (step,) = recorder.steps
    assert [(s.kind, s.stage, s.micro_batch) for s in step.spans] == [
        ("forward", 2, 3),
        ("recompute", 2, 3),
        (kind, 2, 3),
        ("optimizer", 2, 0),
    ]
    _, again, backward, optimizer = step.spans
    assert backward.start_ns <= again.start_ns <= again.end_ns <= backward.end_ns <= optimizer.start_ns


def test_a_long_run_takes_no_more_memory() -> None:
    """The last twenty steps are kept, by number."""
    recorder = Recorder(CPU)
    for _ in range(30):
        step(recorder)
    assert [kept.number for kept in recorder.steps] == list(range(10, 30))
    assert len(recorder.step_us) == 30
