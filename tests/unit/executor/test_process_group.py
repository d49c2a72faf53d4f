"""Tests that a destroyed process group is released: its threads could abort the process at its end."""

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
def test_later_imports_do_not_hold_the_process_group() -> None:
    """In a new process, because everything is imported in this one."""
    done = subprocess.run([sys.executable, "-c", LATE], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "gone"  # after lines that older releases of gloo print
