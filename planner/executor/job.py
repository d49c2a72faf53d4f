"""Joining the other processes of a job, and refusing to start with those that were told different things."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from planner.core.errors import UsageError
from planner.executor.watch.store import job_store

__all__ = ["join_job"]


def join_job(device: torch.device, timeout_s: float, told: Mapping[str, Any]) -> bool:
    """Makes the default process group, unless there is one; every process of the job must call it.

    Args:
        device: Where tensors lie that are sent.
        timeout_s: A transfer that takes so long fails.
        told: What must be the same on every process, by what to call it.

    Returns:
        Whether the group was made here, and is to be left by the caller.

    Raises:
        UsageError: A process was told something else than the first.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        return False
    if "RANK" not in os.environ:
        dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
        return True
    # The watch, which knows more, is to find out first.
    timeout = timedelta(seconds=timeout_s + 30)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, timeout=timeout, store=job_store(timeout), rank=rank, world_size=world)
    _check_same(told)
    return True


# Private functions


def _check_same(told: Mapping[str, Any]) -> None:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(told))
    for what, value in everybody[0].items():
        others = [rank for rank, its in enumerate(everybody) if its[what] != value]
        if others:
            dist.destroy_process_group()
            raise UsageError(
                f"rank {others[0]} has another {what} ({everybody[others[0]][what]}) than rank 0 ({value})",
                hint="give every process the same files and the same command line, also on other machines",
            )
