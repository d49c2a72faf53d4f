"""Exchange of values over the store of the job: the first rank collects them and decides for all ranks.

A process group would open a connection between each two ranks, and would end a rank that waits longer than its limit.
Here every rank has one connection, to the store, and waits as long as the watch sees no failure.
"""

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from planner.executor.watch.store import job_store

_LONGEST = timedelta(days=1)
"""No limit: writing takes as long as the disk needs, and the watch finds ranks that make no progress."""
_JOINING = timedelta(minutes=5)


class Exchange:
    """Rounds in which all ranks take part, on a separate connection to the store.

    Several threads may use it in turn, in the same order on every rank.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        # torch declares `clone` for some kinds of stores alone.
        store: Any = job_store(_JOINING) if world > 1 else None
        self._store = None if store is None else store.clone()
        self._round = 0

    def decided(self, value: str, decide: Callable[[Sequence[str]], str]) -> str:
        """Return what the first rank decides on the values of all ranks.

        Args:
            value: Value of this rank.
            decide: Called on the first rank only, with the values by rank; must not raise.
        """
        if self._store is None:
            return decide([value])
        self._round += 1
        name = f"exchange/{self._round}"
        if self._rank > 0:
            self._store.set(f"{name}/{self._rank}", zlib.compress(value.encode()))
            self._store.wait([name], _LONGEST)
            result = zlib.decompress(self._store.get(name)).decode()
            if self._store.add(f"{name}/read", 1) == self._world - 1:
                self._store.set(f"{name}/done", "")
            return result
        keys = [f"{name}/{rank}" for rank in range(1, self._world)]
        self._store.wait(keys, _LONGEST)
        result = decide([value, *(zlib.decompress(self._store.get(key)).decode() for key in keys)])
        self._store.set(name, zlib.compress(result.encode()))
        # Values may be large. What all ranks have read was read before this round.
        before = f"exchange/{self._round - 1}"
        for key in (*keys, before, f"{before}/read", f"{before}/done"):
            self._store.delete_key(key)
        return result

    def of_first(self, value: str) -> str:
        """Return the first rank's value."""
        return self.decided(value, lambda values: values[0])

    def close(self) -> None:
        """Wait on the first rank, which may hold the store, until all ranks have read the last decision."""
        if self._store is not None and self._rank == 0 and self._round:
            try:
                self._store.wait([f"exchange/{self._round}/done"], _JOINING)
            except dist.DistError:  # a rank is gone: the watch reports it
                return
