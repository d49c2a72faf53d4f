"""Exchange of values between all ranks over the job's store.

The first rank collects the values of all ranks, computes a result from them, and returns the result to all ranks. A
rank waits as long as needed, without the timeout of a process group.
"""

import json
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from planner.executor.watch.store import job_store

_LONGEST = timedelta(days=1)
"""Timeout that is never reached, because the failure watch ends ranks that make no progress."""
_JOINING = timedelta(minutes=5)


class ValueExchange:
    """Exchange of values between all ranks, in rounds.

    Several threads of a rank may use one object in turn, in the same order on every rank.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        # torch declares `clone` only for some types of stores.
        store: Any = job_store(_JOINING) if world > 1 else None
        self._store: Any = None if store is None else store.clone()
        self._round = 0

    def decide(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return, on every rank, the result of `decide` for the values of all ranks.

        Every rank must call this method, with a value that JSON can represent; tuples become lists. Only the first rank
        calls `decide`, which must not raise an error. The values are in the order of ranks.
        """
        if self._store is None:
            return decide([value])
        self._round += 1
        name = f"exchange/{self._round}"
        if self._rank > 0:
            self._set(f"{name}/{self._rank}", value)
            self._store.wait([name], _LONGEST)
            result = self._get(name)
            if self._store.add(f"{name}/read", 1) == self._world - 1:
                self._store.set(f"{name}/done", "")
            return result
        keys = [f"{name}/{rank}" for rank in range(1, self._world)]
        self._store.wait(keys, _LONGEST)
        result = decide([value, *map(self._get, keys)])
        self._set(name, result)
        # Delete this round's values, which may be large, and the previous result, which all ranks have read by now.
        before = f"exchange/{self._round - 1}"
        for key in (*keys, before, f"{before}/read", f"{before}/done"):
            self._store.delete_key(key)
        return result

    def value_of_first_rank(self, value: Any) -> Any:
        """Return the first rank's value on every rank. Every rank must call this method."""
        return self.decide(value, lambda values: values[0])

    def close(self) -> None:
        """On the first rank, wait until all ranks have read the last result."""
        if self._store is not None and self._rank == 0 and self._round:
            try:  # the store may end with this process
                self._store.wait([f"exchange/{self._round}/done"], _JOINING)
            except dist.DistError:  # a rank has died, which the watch reports
                return

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, zlib.compress(json.dumps(value).encode()))

    def _get(self, key: str) -> Any:
        return json.loads(zlib.decompress(self._store.get(key)))
