"""What a run took: every forward and backward of this process on one clock, step time, peak memory.

Memory is read in the second step, when the optimizer's state exists. On the CPU every allocation since the process
began is counted by torch's profiler until then (see `planner.device.meter`), which slows these steps: they count as
warm-up. Of a long run the last steps are kept, so that recording takes no more memory the longer it runs.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from planner.device.meter import recorded_allocations
from planner.executor.measure.run_times import RunSpan, RunSpanKind, RunStep, typical_us

__all__ = ["WARM_UP_STEPS", "Recorder"]

WARM_UP_STEPS = 2

_KEPT_STEPS = 20


class _Timed(NamedTuple):
    """A span on CUDA, whose times are not known before the device has got there."""

    kind: RunSpanKind
    stage: int
    micro_batch: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class Recorder:
    """Times and memory of one rank. Make it before anything that should count as this rank's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._spans: list[RunSpan] = []
        self._pending: list[_Timed] = []
        self._backward_of: int | None = None
        self.first_micro_batch = 0
        """What the micro-batches that are timed are counted from: a mini-batch may run in several parts."""
        self._steps: deque[RunStep] = deque(maxlen=_KEPT_STEPS)
        self.step_us: list[float] = []
        self.peak_bytes = 0
        self.outside_bytes = 0
        """What the device had in use beside the tensors of the peak; known on CUDA."""
        self._live_bytes = 0
        self._recording: AbstractContextManager[list[int]] | None = None
        self._sizes: list[int] = []
        gc.collect()  # what is garbage by now is not this rank's, and must not be taken off its memory later
        self._start_recording()

    @property
    def steps(self) -> tuple[RunStep, ...]:
        """The last steps, warm-up included, on the clock of `time.perf_counter_ns`."""
        return tuple(self._steps)

    def timed(self, kind: RunSpanKind, work: Callable[[], Any], *, stage: int = 0, micro_batch: int = 0) -> Any:
        """Runs `work` and notes its time as `kind` of a micro-batch on one of the process's stages."""
        micro_batch += self.first_micro_batch
        self._backward_of = micro_batch if kind == "backward" else None
        result = self._noted(kind, work, stage, micro_batch)
        self._backward_of = None
        return result

    def timed_again(self, work: Callable[[], Any], *, stage: int = 0) -> Any:
        """Runs `work`, which is recomputation if a backward is being timed."""
        if self._backward_of is None:
            return work()
        return self._noted("recompute", work, stage, self._backward_of)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, from first forward to the optimizer's step."""
        if self._step == WARM_UP_STEPS - 1:
            self._begin_memory()
        self._synchronize()
        begin = time.perf_counter_ns()
        base = self._event() if self._device.type == "cuda" else None
        yield
        self._synchronize()
        self.step_us.append((time.perf_counter_ns() - begin) / 1e3)
        if base is not None:
            self._collect_events(base, begin)
        self._steps.append(RunStep(self._step, tuple(self._spans)))
        self._spans = []
        if self._step == WARM_UP_STEPS - 1:
            self._end_memory()
        self._step += 1

    @contextmanager
    def optimizer(self, *, stage: int = 0) -> Iterator[None]:
        """What follows the last backward: the optimizer's step."""
        if self._device.type == "cuda":
            start = self._event()
            yield
            self._pending.append(_Timed("optimizer", stage, 0, start, self._event()))
            return
        begin = time.perf_counter_ns()
        yield
        self._spans.append(RunSpan("optimizer", stage, 0, begin, time.perf_counter_ns()))

    def typical_us(self, kind: RunSpanKind, *, stage: int = 0) -> float:
        """Median time of one micro-batch's `kind`; 0 if nothing was timed."""
        return typical_us([step.spans for step in self._steps if step.number >= WARM_UP_STEPS], kind, stage)

    def close(self) -> None:
        """Stops recording; a run too short to reach the step whose memory is read has the peak of all it did."""
        if self._recording is not None:
            self._end_memory()

    # Private methods

    def _noted(self, kind: RunSpanKind, work: Callable[[], Any], stage: int, micro_batch: int) -> Any:
        if self._device.type == "cuda":
            start = self._event()
            result = work()
            self._pending.append(_Timed(kind, stage, micro_batch, start, self._event()))
            return result
        begin = time.perf_counter_ns()
        result = work()
        self._spans.append(RunSpan(kind, stage, micro_batch, begin, time.perf_counter_ns()))
        return result

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect_events(self, base: torch.cuda.Event, base_ns: int) -> None:
        """Puts the device's times on the host's clock, on which the idle device reached `base` at `base_ns`."""
        for kind, stage, micro_batch, *events in self._pending:
            start, end = (base_ns + round(base.elapsed_time(event) * 1e6) for event in events)
            self._spans.append(RunSpan(kind, stage, micro_batch, start, end))
        self._pending.clear()

    def _begin_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._live_bytes += sum(self._stop_recording())
        self._start_recording()

    def _end_memory(self) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            self.outside_bytes = max(0, total - free - self.peak_bytes)
            return
        self.peak_bytes = self._live_bytes
        for size in self._stop_recording():
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _start_recording(self) -> None:
        if self._device.type == "cpu":
            self._recording = recorded_allocations()
            self._sizes = self._recording.__enter__()

    def _stop_recording(self) -> list[int]:
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None
        return self._sizes

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
