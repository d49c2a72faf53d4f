"""What a run took: time of every forward and backward on this stage, step time, peak memory.

Memory is read in the second step, when the optimizer's state exists. On the CPU every allocation since the process
began is counted by torch's profiler until then (see `planner.model.meter`), which slows these steps: they count as
warm-up.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from planner.model.meter import recorded_allocations

__all__ = ["WARM_UP_STEPS", "Recorder"]

WARM_UP_STEPS = 2


class Recorder:
    """Times and memory of one rank. Make it before anything that should count as this stage's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._pending: list[tuple[tuple[str, int], torch.cuda.Event, torch.cuda.Event]] = []
        self._times_us: dict[tuple[str, int], list[float]] = {}
        self._started_ns = 0
        self.step_us: list[float] = []
        self.peak_bytes = 0
        self._live_bytes = 0
        self._recording: AbstractContextManager[list[int]] | None = None
        self._sizes: list[int] = []
        self._start_recording()

    def timed(self, kind: str, work: Callable[[], Any], *, stage: int = 0) -> Any:
        """Runs `work` and notes its time as `kind` of one of the process's stages."""
        if self._device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = work()
            end.record()
            self._pending.append(((kind, stage), start, end))
            return result
        begin = time.perf_counter_ns()
        result = work()
        if self._step >= WARM_UP_STEPS:
            self._times_us.setdefault((kind, stage), []).append((time.perf_counter_ns() - begin) / 1e3)
        return result

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, from first forward to the optimizer's step."""
        if self._step == WARM_UP_STEPS - 1:
            self._begin_memory()
        self._synchronize()
        begin = time.perf_counter_ns()
        yield
        self._synchronize()
        self.step_us.append((time.perf_counter_ns() - begin) / 1e3)
        self._collect_events()
        if self._step == WARM_UP_STEPS - 1:
            self._end_memory()
        self._step += 1

    def typical_us(self, kind: str, *, stage: int = 0) -> float:
        """Median time of one micro-batch's `kind`; 0 if nothing was timed."""
        times = self._times_us.get((kind, stage))
        return statistics.median(times) if times else 0.0

    def close(self) -> None:
        """Stops recording; a run too short to reach the step whose memory is read has the peak of all it did."""
        if self._recording is not None:
            self._end_memory()

    # Private methods

    def _begin_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._live_bytes += sum(self._stop_recording())
        self._start_recording()

    def _end_memory(self) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
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

    def _collect_events(self) -> None:
        for kind, start, end in self._pending:
            if self._step >= WARM_UP_STEPS:
                self._times_us.setdefault(kind, []).append(start.elapsed_time(end) * 1e3)
        self._pending.clear()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
