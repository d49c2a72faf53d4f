"""Measure live and peak bytes of a function with the device's own allocator; and the meter of the processor.

Torch's profiler records every CPU allocation and release with its size, including operator temporaries, which no
dispatch mode sees. Its older recorder does so without Kineto's start-up time and messages. Resident set size would be
useless, because the C allocator keeps freed memory.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]


class Usage(NamedTuple):
    """Bytes relative to the live memory before."""

    peak_bytes: int
    end_bytes: int
    """Bytes at the end; negative if the function released more than it allocated."""


class Meter(Protocol):
    """Meter of the memory of a function."""

    def measure(self, work: Callable[[], object]) -> Usage:
        """Run `work` once, release its result, and return its memory."""
        ...


class CpuMeter:
    """Meter that counts the CPU allocator's events."""

    def measure(self, work: Callable[[], object]) -> Usage:
        """Run `work` once and return its memory."""
        # Memory that a garbage collection released would count as released by `work`.
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
    """Record the sizes of all CPU allocations (positive) and releases (negative) in order, until the block ends."""
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
