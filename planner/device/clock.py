"""Clocks for short pieces of work, and the processor's.

With one thread it is process time, which other processes cannot lengthen by taking the core away; with several threads
wall time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol


def typical_us(times_us: Sequence[float]) -> float:
    """What several repeats come to: the median, as that is what a step of many micro-batches is made of.

    The smallest would be repeated more exactly, and is never reached by all layers of a step at once: by it, steps of
    two processes on a CPU were predicted 4 to 14 % too short.
    """
    return statistics.median(times_us)


class Clock(Protocol):
    """Times a piece of work."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Microseconds that `work` takes on the device."""
        ...

    def restart(self) -> None:
        """Called by `work`: what it did before does not count."""
        ...

    def stop(self) -> None:
        """Called by `work`: what it does from here on does not count."""
        ...


class CpuClock:
    """Process time for one thread, wall time for several."""

    def __init__(self, threads: int) -> None:
        self._now_ns = time.process_time_ns if threads == 1 else time.perf_counter_ns

    def time_us(self, work: Callable[[], object]) -> float:
        """Microseconds that `work` takes."""
        self._end_ns = 0
        self.restart()
        work()
        return ((self._end_ns or self._now_ns()) - self._start_ns) / 1e3

    def restart(self) -> None:
        """Called by `work`: what it did before does not count."""
        self._start_ns = self._now_ns()

    def stop(self) -> None:
        """Called by `work`: what it does from here on does not count."""
        self._end_ns = self._now_ns()
