"""Access to the key-value store that all processes of a job share."""

import os
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from planner.core.errors import TrainingError
from planner.executor.watch.explain import MOST_NAMED, join_with_count

_HELLO, _ANSWER, _JOINED = "gpipe-plan/hello", "gpipe-plan/answer", "gpipe-plan/joined"
_ASKED_EVERY_S = 0.05
_REPORTED_EVERY_S = 10.0


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from the process group or else from the launcher."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_store_host() -> bool:
    """Return True if the job's store is in this process. The store then ends with the process."""
    return rank_and_world_size()[0] == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def job_store(timeout: timedelta) -> Store:
    """Return the job's store: the process group's, the launcher's, or one that the first rank creates.

    Raises:
        TrainingError: Other processes did not join within the timeout.
    """
    store = _get_default_store() if dist.is_initialized() else _launchers_store(timeout)
    # A launcher may keep its store when it restarts the processes. Without another prefix for each launch, processes
    # would find addresses of earlier processes.
    return PrefixStore(f"gpipe-plan/{_launch_name(store, timeout)}", store)


def _launchers_store(timeout: timedelta) -> Store:
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not export all public names
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_store_host(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    return store


def _launch_name(store: Store, timeout: timedelta) -> str:
    rank, world = rank_and_world_size()
    address = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    key = os.getpid(), *address, rank, world  # a forked process must agree on a name of its own
    if key not in _agreed:
        _agreed[key] = _agree_on_name(store, rank, world, timeout)
    return _agreed[key]


_agreed: dict[tuple[int | str, ...], str] = {}
"""Agreed name of each launch, by process id, address and port of the store, rank, and number of ranks."""


def _agree_on_name(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Return the name of this launch of the job, which the first rank chooses."""
    # Processes of earlier launches have other random names. torchrun's `TORCHELASTIC_RESTART_COUNT` does not identify a
    # launch, because a machine that was lost and came back has a lower count than others.
    name = uuid.uuid4().hex
    store.set(f"{_HELLO}/{rank}", name)
    if rank == 0:
        _answer_all(store, name, world, timeout)
        return name
    try:
        store.wait([f"{_ANSWER}/{name}"], timeout)
    except dist.DistError as error:
        raise _missing([0], timeout) from error
    launch = store.get(f"{_ANSWER}/{name}").decode()
    store.set(f"{_JOINED}/{launch}/{rank}", "")
    return launch


def _answer_all(store: Store, launch: str, world: int, timeout: timedelta) -> None:
    # Processes of earlier launches are answered as well, but never read the answer.
    begin = reported = time.monotonic()
    answered: set[str] = set()
    missing = list(range(1, world))
    while missing:
        for rank in missing:
            hello = store.get(f"{_HELLO}/{rank}").decode() if store.check([f"{_HELLO}/{rank}"]) else ""
            if hello and hello not in answered:
                store.set(f"{_ANSWER}/{hello}", launch)
                answered.add(hello)
        missing = [rank for rank in missing if not store.check([f"{_JOINED}/{launch}/{rank}"])]
        if not missing:
            return
        now = time.monotonic()
        if now - begin > timeout.total_seconds():
            raise _missing(missing, timeout)
        if now - reported > _REPORTED_EVERY_S:
            reported = now
            print(f"waiting for {_names(missing)} to join for {now - begin:.0f} s", file=sys.stderr, flush=True)
        time.sleep(_ASKED_EVERY_S)


def _missing(ranks: Sequence[int], timeout: timedelta) -> TrainingError:
    return TrainingError(
        f"{_names(ranks)} did not join within {timeout.total_seconds():g} s",
        hint="start the script on all machines, with as many processes as the plan needs",
    )


def _names(ranks: Sequence[int]) -> str:
    return join_with_count([f"rank {rank}" for rank in ranks[:MOST_NAMED]], len(ranks), ", ")
