"""Settings of the C library's allocator, in a new process because they cannot be undone."""

import subprocess
import sys

import pytest

MEASURED = """
import torch
from planner.device.machine import release_freed_memory, keep_freed_memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory(below={below})
before = resident_bytes()
tensor = torch.ones(2**25)
del tensor
kept = resident_bytes() - before
release_freed_memory()
print(kept, resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings, read from /proc")
@pytest.mark.parametrize("below", [None, 2**25, pytest.param(2**20, marks=pytest.mark.nightly)])
def test_freed_blocks_below_a_size_are_kept(below: int | None) -> None:
    """Of 128 MiB, all are given back by `release_freed_memory`."""
    code = MEASURED.format(below=below)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert (kept > 100 << 20) is (below is None)
    assert left < 32 << 20
