"""Properties of this machine (name of the CPU, cores, memory), and settings of the C library's allocator."""

import ctypes
import os
import platform
from pathlib import Path
from typing import NamedTuple

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # from glibc's malloc.h

LARGE_BYTES = 2**25
"""Largest `M_MMAP_THRESHOLD` that glibc accepts, in bytes. Blocks above this threshold are mapped separately."""

CACHE_BYTES = 64 * 2**20
"""Size in bytes, assumed to exceed a GPU's L2 cache and one core's share of a CPU's last-level cache."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

_MADV_PAGEOUT = 21  # from Linux's mman.h

_MOST_BLOCKS = 2**16
"""Default of glibc's `M_MMAP_MAX`: the largest number of blocks that `malloc` maps separately."""


def cpu_name() -> str:
    """Return the product name of the CPU, or its architecture if the system reports no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadTime(NamedTuple):
    """Run time of a thread, and time that the thread waited for a free CPU core; both 0 if unknown."""

    ran_ns: int = 0
    waited_ns: int = 0

    @property
    def share(self) -> float:
        """Run time divided by the sum of run time and waiting time; 0 if unknown."""
        wanted_ns = self.ran_ns + self.waited_ns
        return self.ran_ns / wanted_ns if wanted_ns else 0.0

    def since(self, earlier: "ThreadTime") -> "ThreadTime":
        """Return the increase of run time and waiting time since `earlier`."""
        return ThreadTime(self.ran_ns - earlier.ran_ns, self.waited_ns - earlier.waited_ns)


def thread_time() -> ThreadTime:
    """Return this thread's run time and waiting time, from the statistics of Linux's scheduler."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()
        return ThreadTime(int(ran), int(waited))
    except (OSError, ValueError):
        return ThreadTime()


def available_bytes() -> int:
    """Return the host memory available without swapping, in bytes; the total if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def keep_freed_memory(*, below_bytes: int | None = None) -> None:
    """Make glibc keep freed blocks of memory for later allocations, which makes training steps faster.

    Without glibc, this function does nothing.

    Args:
        below_bytes: Size, at most `LARGE_BYTES`. Freed blocks below this size are kept, all others are returned to
            the system. None keeps blocks of all sizes.
    """
    # By default, glibc returns large blocks to the system, which clears their pages before each reuse.
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, below_bytes or LARGE_BYTES)
        libc.mallopt(_M_MMAP_MAX, _MOST_BLOCKS if below_bytes else 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        return


def release_freed_memory() -> None:
    """Return freed memory to the system once, despite `keep_freed_memory`."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def release_file_pages(address: int, size_bytes: int) -> None:
    """Ask Linux to remove the pages of a mapped file from memory; do nothing on other systems.

    The next use of a page reads the file again. Pages that this process has changed keep the changes.
    """
    begin = address - address % _PAGE_BYTES
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size_bytes - begin), _MADV_PAGEOUT)
    except (OSError, AttributeError):
        return
