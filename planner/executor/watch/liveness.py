"""Signs of life of a job's ranks in its store; reading them costs each rank the same for any number of ranks.

Every rank writes its position with every beat. If a failure is suspected, one rank, the reader, reads the positions of
all ranks; the others read only the reader's position. If the reader becomes silent or leaves, another rank replaces it.
Beats are slower in large jobs, so that the store gets the same number of operations per second.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from planner.executor.watch.position import Position

_BEAT_S = 0.5
_MAX_BEATS_PER_S = 500
"""Limit of the beats of all ranks per second; a beat takes two operations of the store, or three if the rank waits."""
_BEATS_UNTIL_SILENT = 6


class Liveness:
    """Signs of life that one rank writes and reads, over a connection to the store that no other thread uses."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self.beat_s = max(_BEAT_S, world / _MAX_BEATS_PER_S)
        """Time between two beats of a rank."""
        self._phase_s = self.beat_s * rank / world
        self.silent_s = _BEATS_UNTIL_SILENT * self.beat_s
        """Time without a beat after which a rank is silent."""
        self._beats = 0
        self._reader = -1
        self._seen: dict[int, tuple[int, float]] = {}
        """Last beat of each rank, and when that was first seen."""
        self._first_look = 0.0
        self._left: set[int] = set()
        """Ranks that are known to have left in order."""

    def write(self, position: Position) -> None:
        """Write the position of this rank: a sign of life."""
        self._beats += 1
        self._store.set(f"at/{self._rank}", json.dumps({"beat": self._beats, **position.summary()}))

    def until_next_beat_s(self) -> float:
        """Return the time until the next beat of this rank; beats of all ranks are spread over the time between two.

        A slow store may answer many ranks at once, so the time does not depend on when the last beat ended.
        """
        return (self._phase_s - time.monotonic()) % self.beat_s

    def leave(self) -> None:
        """Announce that this rank leaves in order; call it once."""
        self._store.set(f"left/{self._rank}", "1")
        self._store.add("left", 1)

    def wait_for_ranks(self, seconds: float) -> None:
        """Wait until all other ranks have left, at most for `seconds`; this rank must have left."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._store.add("left", 0) < self._world:
            time.sleep(self.beat_s / 5)

    def positions(self, ranks: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the positions of `ranks`, by default of all, without those that never wrote one."""
        keys = [f"at/{rank}" for rank in (range(self._world) if ranks is None else ranks)]
        try:
            if ranks != [self._reader]:  # which has written one
                keys = self._existing(keys)
            texts = self._store.multi_get(keys) if keys else []
        except dist.DistError:
            return {}
        return {int(key.removeprefix("at/")): json.loads(text) for key, text in zip(keys, texts, strict=True)}

    def silent(self) -> list[int]:
        """Return the silent ranks that did not leave in order; always empty on ranks other than the reader.

        Call it about once per beat. A rank is silent if it gave no sign of life while this rank looked for `silent_s`.
        """
        is_reader = self._is_reader()
        others = [rank for rank in range(self._world) if rank != self._rank] if is_reader else [self._reader]
        now = time.monotonic()
        if not self._seen:
            self._first_look = now
        for rank, at in self.positions(others).items():
            if self._seen.get(rank, (None,))[0] != at["beat"]:
                self._seen[rank] = (at["beat"], now)
        late = [rank for rank in others if rank in self._seen and now - self._seen[rank][1] > self.silent_s]
        if is_reader:
            self._left.update(r for r in late if r not in self._left and self._store.check([f"left/{r}"]))
            return [rank for rank in late if rank not in self._left]
        if late:
            # One of the ranks that notice it becomes the reader, and observes all other ranks from the start.
            self._reader = int(self._store.compare_set("reader", str(self._reader), str(self._rank)))
            self._seen.clear()
        return []

    def wait_for_silent(self) -> list[int] | None:
        """Wait until it is clear which ranks give no sign of life; None if a failure was reported meanwhile."""
        self._seen.clear()
        begin = time.monotonic()
        # A reader that has died is noticed in half of that time.
        while time.monotonic() - begin < 2.5 * self.silent_s:
            if self._store.check(["failure"]):
                return None
            silent = self.silent()
            if silent or (self._is_reader() and self._is_each_alive()):
                return silent
            time.sleep(self.beat_s / 2)
        return []

    # Private methods

    def _is_reader(self) -> bool:
        if self._reader < 0:
            self._reader = int(self._store.compare_set("reader", "", str(self._rank)))
        return self._reader == self._rank

    def _is_each_alive(self) -> bool:
        """Return True if every rank has given a sign of life since the first look, or has left."""
        return bool(self._seen) and all(
            since > self._first_look for rank, (_, since) in self._seen.items() if rank not in self._left
        )

    def _existing(self, keys: list[str]) -> list[str]:
        """Return the keys that are set: reading another key would wait for it."""
        if self._store.check(keys):
            return keys
        half = len(keys) // 2
        return self._existing(keys[:half]) + self._existing(keys[half:]) if half else []
