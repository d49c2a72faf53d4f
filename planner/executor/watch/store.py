"""Access the key-value store that all processes of a job share."""

import os
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from planner.core.errors import TrainingError
from planner.executor.watch.explain import MOST_NAMED, listed

_HELLO, _ANSWER, _JOINED = "gpipe-plan/hello", "gpipe-plan/answer", "gpipe-plan/joined"
_ASKED_EVERY_S = 0.05
_REPORTED_EVERY_S = 10.0


def rank_here() -> tuple[int, int]:
    """Return the rank of this process and the number of processes: from the process group, else from the launcher."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def holds_store() -> bool:
    """Return True if the job's store is in this process, and ends with it."""
    return rank_here()[0] == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def job_store(timeout: timedelta) -> Store:
    """Return the process group's store, else the launcher's, else one of the first rank.

    A launcher may keep its store when it starts the processes again. They would find the addresses of earlier
    processes, so each start has a separate key prefix.

    Raises:
        TrainingError: The other processes did not join.
    """
    store = _get_default_store() if dist.is_initialized() else _launchers_store(timeout)
    return PrefixStore(f"gpipe-plan/{_start(store, timeout)}", store)


def _launchers_store(timeout: timedelta) -> Store:
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists not all that is public
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=holds_store(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    return store


def _start(store: Store, timeout: timedelta) -> str:
    """Return a name for this start of the job's processes, the same on all of them."""
    rank, world = rank_here()
    address = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    key = os.getpid(), *address, rank, world  # a process that was forked has agreed on nothing
    if key not in _agreed:
        _agreed[key] = _agree(store, rank, world, timeout)
    return _agreed[key]


_agreed: dict[tuple[int | str, ...], str] = {}
"""Names that this process has agreed on with the others; stored, because it opens the store more than once."""


def _agree(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Return the first rank's choice, which it answers to each process that announces itself under a new name.

    torchrun counts its restarts (`TORCHELASTIC_RESTART_COUNT`) separately on each machine. So a machine that was lost
    and came back has a lower count than the others.
    """
    name = uuid.uuid4().hex
    store.set(f"{_HELLO}/{rank}", name)
    if rank == 0:
        _answer_all(store, name, world, timeout)
        return name
    try:
        store.wait([f"{_ANSWER}/{name}"], timeout)
    except dist.DistError as error:
        raise _missing([0], timeout) from error
    start = store.get(f"{_ANSWER}/{name}").decode()
    store.set(f"{_JOINED}/{start}/{rank}", "")
    return start


def _answer_all(store: Store, start: str, world: int, timeout: timedelta) -> None:
    """Answer until every rank has joined; announcements of earlier processes are answered too, but not read."""
    begin = reported = time.monotonic()
    answered: set[str] = set()
    missing = list(range(1, world))
    while missing:
        for rank in missing:
            hello = store.get(f"{_HELLO}/{rank}").decode() if store.check([f"{_HELLO}/{rank}"]) else ""
            if hello and hello not in answered:
                store.set(f"{_ANSWER}/{hello}", start)
                answered.add(hello)
        missing = [rank for rank in missing if not store.check([f"{_JOINED}/{start}/{rank}"])]
        if not missing:
            return
        now = time.monotonic()
        if now - begin > timeout.total_seconds():
            raise _missing(missing, timeout)
        if now - reported > _REPORTED_EVERY_S:
            reported = now
            print(f"waiting for {_names(missing)} to join since {now - begin:.0f} s", file=sys.stderr, flush=True)
        time.sleep(_ASKED_EVERY_S)


def _missing(ranks: Sequence[int], timeout: timedelta) -> TrainingError:
    return TrainingError(
        f"{_names(ranks)} did not join within {timeout.total_seconds():g} s",
        hint="start the script on all machines, with as many processes as the plan needs",
    )


def _names(ranks: Sequence[int]) -> str:
    return listed([f"rank {rank}" for rank in ranks[:MOST_NAMED]], len(ranks), ", ")
