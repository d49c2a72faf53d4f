"""Settings of the C library's allocator, in a new process because they cannot be undone."""

import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

MEASURED = """
import torch
from planner.device.machine import release_freed_memory, keep_freed_memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory(below_bytes={below})
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
def test_freed_blocks_below_a_size_are_kept(below: int | None, tmp_path: Path) -> None:
    """Of 128 MiB, all are given back by `release_freed_memory`."""
    (tmp_path / "measured.py").write_text(MEASURED.format(below=below))
    kept, left = map(int, run_ranks(1, ["measured.py"], tmp_path).split())
    assert (kept > 100 << 20) is (below is None)
    assert left < 32 << 20
