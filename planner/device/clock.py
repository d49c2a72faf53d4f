"""Clocks for short pieces of work.

CPU with one thread: process time, which other processes cannot lengthen by taking the core away; with several threads
wall time. The smallest of many repeats is kept. CUDA: events, the median.
"""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]


class Clock(Protocol):
    """Times a piece of work, and sums repeats up."""

    def time_us(self, work: Callable[[], None]) -> float:
        """Microseconds that `work` takes on the device."""
        ...

    def typical_us(self, times_us: list[float]) -> float:
        """What to keep of several repeats."""
        ...


class CpuClock:
    """Process time for one thread, wall time for several."""

    def __init__(self, threads: int) -> None:
        self._now_ns = time.process_time_ns if threads == 1 else time.perf_counter_ns

    def time_us(self, work: Callable[[], None]) -> float:
        """Microseconds that `work` takes."""
        start = self._now_ns()
        work()
        return (self._now_ns() - start) / 1e3

    def typical_us(self, times_us: list[float]) -> float:
        """The smallest: on a CPU everything else only adds."""
        return min(times_us)


class CudaClock:
    """CUDA events around work on the current stream."""

    def time_us(self, work: Callable[[], None]) -> float:
        """Microseconds between the events, all earlier work done."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def typical_us(self, times_us: list[float]) -> float:
        """The median: a GPU's clock wanders both ways."""
        return statistics.median(times_us)


def clock_for(device: torch.device, threads: int) -> Clock:
    """The clock of a CPU or CUDA device."""
    return CudaClock() if device.type == "cuda" else CpuClock(threads)
