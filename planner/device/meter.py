"""Meters that measure the memory of a function: the interface, and the meter for CPUs.

The meter for CPUs uses torch's profiler, which records every allocation and release, also inside operators. The
resident set size would be wrong, because the C allocator keeps freed memory.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]


class MemoryUsage(NamedTuple):
    """Memory that a function call allocates, in bytes, relative to the memory in use before the call."""

    peak_bytes: int
    end_bytes: int
    """Memory that is still allocated after the call; negative if the call released more than it allocated."""


class MemoryMeter(Protocol):
    """Interface of meters that measure the memory of a function."""

    def measure(self, work: Callable[[], object]) -> MemoryUsage:
        """Run `work` once, release its result, and return the memory that it used."""


class CpuMemoryMeter:
    """Meter that adds up the allocations and releases of torch's CPU allocator."""

    def measure(self, work: Callable[[], object]) -> MemoryUsage:
        # Garbage collection is off, because memory that it releases would count as released by `work`.
        collects = gc.isenabled()
        gc.disable()
        try:
            with recorded_allocations() as sizes:
                work()
        finally:
            if collects:
                gc.enable()
        live = peak = 0
        for size in sizes:
            live += size
            peak = max(peak, live)
        return MemoryUsage(peak, live)


@contextmanager
def recorded_allocations() -> Iterator[list[int]]:
    """Record the sizes of all CPU allocations (positive) and releases (negative), in bytes, in order.

    The yielded list is empty until the block ends.
    """
    sizes: list[int] = []
    # The newer interface of the profiler starts Kineto, which takes time and prints messages.
    config = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    _enable_profiler_legacy(config)
    try:
        yield sizes
    finally:
        threads: Any = _disable_profiler_legacy()
        sizes.extend(
            int(event.cpu_memory_usage()) for events in threads for event in events if event.kind() == "memory_alloc"
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error`, or an error that caused it, reports exhausted memory."""
    while error is not None:
        # Torch's CPU allocator has no error class of its own.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
