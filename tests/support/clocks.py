"""Limits on real time, which only `make nightly` compares: on a busy machine any work may take long."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cpu_seconds", "is_within", "limited_cpu_time", "seconds_since"]


def is_within(seconds: float, limit_s: float) -> bool:
    """Return True if the time is below the limit, or if times are not compared."""
    return seconds < limit_s or "TIMED" not in os.environ


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time that the work takes, least of three."""
    times_s = []
    for _ in range(3):
        begin = time.process_time()
        work()
        times_s.append(time.process_time() - begin)
    return min(times_s)


def seconds_since(path: Path) -> float:
    """Return the seconds since the file was written."""
    return time.time() - path.stat().st_mtime


@contextmanager
def limited_cpu_time(limit_s: float) -> Iterator[None]:
    """Check that the block takes less CPU time than the limit."""
    begin = time.process_time()
    yield
    assert is_within(time.process_time() - begin, limit_s)
