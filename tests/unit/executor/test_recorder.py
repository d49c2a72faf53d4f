"""Tests of the recorder of times and peak memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from planner.device.machine import ThreadTime
from planner.device.meter import CpuMemoryMeter
from planner.executor.measure.recorder import WARM_UP_STEPS, RunRecorder

CPU = torch.device("cpu")

_MS = 1_000_000


class Clock:
    """Clock that the test advances, and that takes 1 us per reading."""

    def __init__(self) -> None:
        self._now_ns = 0

    def read_ns(self) -> int:
        self._now_ns += 1000
        return self._now_ns

    def later(self, milliseconds: int) -> Callable[[], None]:
        """Return a function that advances the clock."""

        def work() -> None:
            self._now_ns += milliseconds * _MS

        return work


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    host = Clock()
    monkeypatch.setattr("time.perf_counter_ns", host.read_ns)
    return host


@pytest.fixture
def recorder() -> "RunRecorder":
    """Return a recorder. Tests that do not take it through its warm-up close it."""
    return RunRecorder(CPU)


def step(recorder: RunRecorder, clock: Clock, kept: list[Tensor] | None = None, *, size: int = 0) -> None:
    """Run one step: a forward of 1 ms, a backward of 20 ms, and `size` temporary bytes."""
    with recorder.step():
        recorder.timed("forward", clock.later(1))
        recorder.timed("backward", clock.later(20))
        if size:
            temporary = torch.empty(size, dtype=torch.uint8)
            del temporary
        if kept is not None:
            kept.append(torch.empty(1000, dtype=torch.uint8))


def test_timed_returns_the_result(recorder: RunRecorder) -> None:
    assert recorder.timed("forward", lambda: 42) == 42
    recorder.close()


def test_warm_up_steps_are_left_out_of_stage_times(recorder: RunRecorder, clock: Clock) -> None:
    """The list of step times has them."""
    for _ in range(WARM_UP_STEPS):
        step(recorder, clock)
    assert recorder.typical_action_us("forward") == 0.0
    for _ in range(3):
        step(recorder, clock)
    assert len(recorder.step_us) == WARM_UP_STEPS + 3
    assert [recorder.typical_action_us("forward"), recorder.typical_action_us("backward")] == [1001.0, 20_001.0]
    assert recorder.step_us == [21_005.0] * (WARM_UP_STEPS + 3)


def test_spans_have_times_of_the_host_clock(recorder: RunRecorder, clock: Clock) -> None:
    with recorder.step():
        within_ns = recorder.timed("forward", clock.read_ns)
    (span,) = recorder.steps[0].spans
    assert span.start_ns < within_ns < span.end_ns
    recorder.close()


def test_stage_times_are_medians(recorder: RunRecorder, clock: Clock) -> None:
    for _ in range(WARM_UP_STEPS):
        step(recorder, clock)
    with recorder.step():
        for n, milliseconds in enumerate((1, 1, 200)):
            recorder.timed("forward", clock.later(milliseconds), micro_batch=n)
    assert recorder.typical_action_us("forward") == 1001.0


def test_the_share_of_a_core_is_measured_after_the_warm_up(recorder, monkeypatch, clock):
    times = iter([ThreadTime(7, 5), ThreadTime(10, 6), ThreadTime(11, 9)])
    monkeypatch.setattr("planner.executor.measure.recorder.thread_time", lambda: next(times))
    for share in (*[0.0] * WARM_UP_STEPS, 3 / 4, 4 / 8):
        step(recorder, clock)
        assert recorder.core_share == share


def test_memory_counts_from_the_beginning(clock: Clock) -> None:
    """Memory from before the first step counts if it stays."""
    recorder = RunRecorder(CPU)
    gone = torch.empty(50_000, dtype=torch.uint8)
    model = torch.empty(10_000, dtype=torch.uint8)
    del gone
    kept: list[Tensor] = []
    for size in (700_000, 5000, 900_000, 900_000):
        step(recorder, clock, kept, size=size)
    # Second step: 10,000 + 1000 from the first step + 5000.
    assert recorder.peak.tensor_bytes == 16_000
    del model


def test_the_first_step_does_not_count_for_memory(clock: Clock) -> None:
    """The optimizer has no state before it."""
    recorder = RunRecorder(CPU)
    step(recorder, clock, size=1_000_000)
    step(recorder, clock, size=100)
    assert recorder.peak.tensor_bytes == 100


def test_recording_ends_with_the_warm_up(clock: Clock) -> None:
    """Later steps are not slowed down."""
    recorder = RunRecorder(CPU)
    for _ in range(WARM_UP_STEPS):
        step(recorder, clock)
    assert CpuMemoryMeter().measure(lambda: None).peak_bytes == 0
    step(recorder, clock)
    recorder.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_closing_during_the_warm_up_is_allowed(steps: int, clock: Clock) -> None:
    recorder = RunRecorder(CPU)
    for _ in range(steps):
        step(recorder, clock)
    recorder.close()
    recorder.close()
    assert CpuMemoryMeter().measure(lambda: None).peak_bytes == 0
    assert len(recorder.step_us) == steps


def test_a_run_of_one_step_has_a_peak(clock: Clock) -> None:
    recorder = RunRecorder(CPU)
    step(recorder, clock, size=5000)
    recorder.close()
    assert recorder.peak.tensor_bytes >= 5000


@pytest.mark.parametrize("kind", ["backward", "input backward"])
def test_recomputation_is_recorded_within_its_backward(recorder, kind):
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


def test_only_the_last_twenty_steps_are_kept(clock: Clock) -> None:
    recorder = RunRecorder(CPU)
    for _ in range(30):
        step(recorder, clock)
    assert [kept.number for kept in recorder.steps] == list(range(10, 30))
    assert len(recorder.step_us) == 30
