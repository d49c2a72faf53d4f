"""This machine: what its processor is called, and how its C library hands out memory."""

import ctypes
import os
import platform
from pathlib import Path
from typing import NamedTuple

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # from glibc's malloc.h

LARGE_BYTES = 2**25
"""The largest threshold that glibc takes."""

CACHE_BYTES = 64 * 2**20
"""More than a core's share of a CPU's last cache, or a GPU's L2 cache, can hold."""

_MOST_BLOCKS = 2**16
"""That are mapped one by one: glibc's default."""


def cpu_name() -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreTime(NamedTuple):
    """How long a thread ran, and how long it waited for a core that others had; 0 where the system does not tell."""

    ran_ns: int = 0
    waited_ns: int = 0

    @property
    def share(self) -> float:
        """How much of the time that it wanted to run it did; 0 where nothing is known."""
        wanted_ns = self.ran_ns + self.waited_ns
        return self.ran_ns / wanted_ns if wanted_ns else 0.0

    def since(self, earlier: "CoreTime") -> "CoreTime":
        """How much has come to it since `earlier`."""
        return CoreTime(self.ran_ns - earlier.ran_ns, self.waited_ns - earlier.waited_ns)


def core_time() -> CoreTime:
    """How long this thread ran and waited since it began, by Linux's scheduler."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()
        return CoreTime(int(ran), int(waited))
    except (OSError, ValueError):
        return CoreTime()


def available_bytes() -> int:
    """Memory that can be had without swapping; all there is where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def keep_freed_memory(*, below: int | None = None) -> None:
    """Tells the C library to keep freed memory for the next allocation, as the caching allocators of GPUs do.

    glibc otherwise gives large blocks back to the system, which clears every page again on the next use. Activations
    come and go with every micro-batch: a recomputing Transformer's step took 1.4 times as long. Does nothing without
    glibc.

    Args:
        below: Only blocks of fewer bytes, `LARGE_BYTES` at most; by default all. Then a process is no larger than what
            is alive, but for the holes that smaller blocks leave.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, below or LARGE_BYTES)
        libc.mallopt(_M_MMAP_MAX, _MOST_BLOCKS if below else 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        return


def give_freed_memory_back() -> None:
    """Lets the system have, once, what `keep_freed_memory` holds on to. Does nothing without glibc."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
