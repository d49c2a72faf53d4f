"""Clocks that measure the run time of short functions: the interface, and the clock for CPUs."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol


def median_us(times_us: Sequence[float]) -> float:
    """Return the median of repeated measurements, in microseconds."""
    return statistics.median(times_us)


class Clock(Protocol):
    """Interface of clocks that measure the run time of a function on a device."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Run `work` and return its run time on the device, in microseconds."""

    def restart(self) -> float:
        """Begin the measured time now, so that earlier preparations do not count.

        Returns:
            The time of these preparations in microseconds; 0 if the clock does not measure the host's time, as on GPUs.
        """

    def stop(self) -> None:
        """End the measured time now, so that later cleanup does not count."""


class CpuClock:
    """Clock for functions on the CPU: process time with one thread, wall time with several threads."""

    def __init__(self, threads: int) -> None:
        # Other processes on the same core do not add to process time, which however adds up the threads.
        self._now_ns = time.process_time_ns if threads == 1 else time.perf_counter_ns

    def time_us(self, work: Callable[[], object]) -> float:
        self._end_ns = 0
        self._start_ns = self._now_ns()
        work()
        return ((self._end_ns or self._now_ns()) - self._start_ns) / 1e3

    def restart(self) -> float:
        begun_ns, self._start_ns = self._start_ns, self._now_ns()
        return (self._start_ns - begun_ns) / 1e3

    def stop(self) -> None:
        self._end_ns = self._now_ns()
