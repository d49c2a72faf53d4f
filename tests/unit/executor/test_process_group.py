"""The process group goes when it is destroyed: threads of one that stays abort the process at its end, now and then."""

import subprocess
import sys

import pytest

LATE = """
import gc, weakref
import planner.executor
import torch
import torch.distributed as dist

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
import torch._dynamo  # brings in what has the group of all processes as a default

group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
print("gone" if group() is None else "stays")
"""


@pytest.mark.slow
def test_nothing_that_is_imported_later_holds_the_group() -> None:
    """In a process of its own: here everything is imported."""
    done = subprocess.run([sys.executable, "-c", LATE], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "gone"  # behind what gloo of older releases says
