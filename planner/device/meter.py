"""Live and peak bytes of a piece of work, by the device's own allocator; and the processor's meter.

Torch's profiler records every allocation and release of the CPU's with its size (operator temporaries included, which
no dispatch mode sees); its older recorder does so without Kineto's start-up time and messages. Resident set size would
be useless: the C allocator keeps freed memory.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]


class Usage(NamedTuple):
    """Bytes relative to what was alive before."""

    peak_bytes: int
    end_bytes: int
    """May be negative, where the work released more than it allocated."""


class Meter(Protocol):
    """Measures the memory of a piece of work."""

    def measure(self, work: Callable[[], object]) -> Usage:
        """Runs `work` once, and lets go of what it returns."""
        ...


class CpuMeter:
    """Counts the CPU allocator's events."""

    def measure(self, work: Callable[[], object]) -> Usage:
        """Runs `work` once."""
        # What a garbage collection in the middle released would be taken for released by the work.
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
        return Usage(peak, live)


@contextmanager
def recorded_allocations() -> Iterator[list[int]]:
    """Sizes of all CPU allocations (positive) and releases (negative) in order, filled in when the block ends."""
    sizes: list[int] = []
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
