"""Clocks for short functions, and the processor's clock.

With one thread it is process time, which other processes cannot lengthen by using the core; with several threads it is
wall time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol


def typical_us(times_us: Sequence[float]) -> float:
    """Return the median of several repeats: a step of many micro-batches consists of such times.

    The minimum would vary less, but all layers of a step never reach it at once: with it, steps of two processes on a
    CPU were predicted 4 to 14 % too short.
    """
    return statistics.median(times_us)


class Clock(Protocol):
    """Clock that times a function."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Return the microseconds that `work` takes on the device."""
        ...

    def restart(self) -> None:
        """Start again; called by `work`, whose earlier time then does not count."""
        ...

    def stop(self) -> None:
        """Stop; called by `work`, whose later time then does not count."""
        ...


class CpuClock:
    """Clock of process time for one thread, wall time for several."""

    def __init__(self, threads: int) -> None:
        self._now_ns = time.process_time_ns if threads == 1 else time.perf_counter_ns

    def time_us(self, work: Callable[[], object]) -> float:
        """Return the microseconds that `work` takes."""
        self._end_ns = 0
        self.restart()
        work()
        return ((self._end_ns or self._now_ns()) - self._start_ns) / 1e3

    def restart(self) -> None:
        """Start again; called by `work`, whose earlier time then does not count."""
        self._start_ns = self._now_ns()

    def stop(self) -> None:
        """Stop; called by `work`, whose later time then does not count."""
        self._end_ns = self._now_ns()
