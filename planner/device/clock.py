"""Clocks for short pieces of work, and the processor's.

With one thread it is process time, which other processes cannot lengthen by taking the core away; with several threads
wall time. The smallest of many repeats is kept.
"""

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Times a piece of work, and sums repeats up."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Microseconds that `work` takes on the device."""
        ...

    def typical_us(self, times_us: list[float]) -> float:
        """What to keep of several repeats."""
        ...


class CpuClock:
    """Process time for one thread, wall time for several."""

    def __init__(self, threads: int) -> None:
        self._now_ns = time.process_time_ns if threads == 1 else time.perf_counter_ns

    def time_us(self, work: Callable[[], object]) -> float:
        """Microseconds that `work` takes."""
        start = self._now_ns()
        work()
        return (self._now_ns() - start) / 1e3

    def typical_us(self, times_us: list[float]) -> float:
        """The smallest: on a CPU everything else only adds."""
        return min(times_us)
