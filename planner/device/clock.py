"""Measure the run time of short functions: the interface of clocks, and the clock for CPUs.

The clock for CPUs measures process time if there is one thread, because other processes on the same core do not add to
it. With several threads it measures wall time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol


def typical_us(times_us: Sequence[float]) -> float:
    """Return the median of repeated measurements, in microseconds.

    The minimum would vary less, but no step reaches the minimum in all layers at once. With the minimum, steps of two
    processes on a CPU were predicted 4 to 14 % too short.
    """
    return statistics.median(times_us)


class Clock(Protocol):
    """Interface of a clock that measures the run time of a function on a device."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Run `work` and return the time that it takes on the device, in microseconds."""
        ...

    def restart(self) -> None:
        """Restart the measurement. The measured function calls this after preparations that must not count."""
        ...

    def stop(self) -> None:
        """End the measurement now. The measured function calls this if what follows must not count."""
        ...


class CpuClock:
    """Clock for functions on the CPU: process time if they use one thread, wall time if they use several."""

    def __init__(self, threads: int) -> None:
        self._now_ns = time.process_time_ns if threads == 1 else time.perf_counter_ns

    def time_us(self, work: Callable[[], object]) -> float:
        """Run `work` and return the time that it takes, in microseconds."""
        self._end_ns = 0
        self.restart()
        work()
        return ((self._end_ns or self._now_ns()) - self._start_ns) / 1e3

    def restart(self) -> None:
        """Restart the measurement. The measured function calls this after preparations that must not count."""
        self._start_ns = self._now_ns()

    def stop(self) -> None:
        """End the measurement now. The measured function calls this if what follows must not count."""
        self._end_ns = self._now_ns()
