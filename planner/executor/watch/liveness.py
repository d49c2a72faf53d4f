"""Signs of life of a job's ranks, in the job's store.

Every rank writes its activity at regular intervals (beats). One rank, the reader, reads the activities of all ranks if
a failure is suspected. Other ranks read only the reader's activity. If the reader becomes silent or leaves, another
rank becomes the reader. In large jobs, the intervals are longer.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from planner.executor.watch.activity import RankActivity

_BEAT_S = 0.5
_MAX_BEATS_PER_S = 500
"""Upper bound on the beats of all ranks per second."""
_BEATS_UNTIL_SILENT = 6


class Heartbeats:
    """Signs of life of one rank in the store, and access to those of other ranks. No other thread may use `store`."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self.beat_s = max(_BEAT_S, world / _MAX_BEATS_PER_S)
        """Seconds between two beats of a rank."""
        self._phase_s = self.beat_s * rank / world
        self.silent_s = _BEATS_UNTIL_SILENT * self.beat_s
        """Seconds without a beat after which a rank is silent."""
        self._beats = 0
        self._reader = -1
        self._seen: dict[int, tuple[int, float]] = {}
        """Number of each rank's last beat, and the time at which this rank first read it."""
        self._first_look = 0.0
        self._left: set[int] = set()
        """Ranks that are known to have left with `announce_exit`."""

    def write(self, activity: RankActivity) -> None:
        """Write the activity of this rank to the store, as a sign of life."""
        self._beats += 1
        self._store.set(f"at/{self._rank}", json.dumps({"beat": self._beats, **activity.summary()}))

    def until_next_beat_s(self) -> float:
        """Return the seconds until this rank's next beat."""
        # Each rank has a fixed slot in the interval, so that beats of many ranks do not coincide if the store is slow.
        return (self._phase_s - time.monotonic()) % self.beat_s

    def announce_exit(self) -> None:
        """Announce that this rank leaves the job and is not dead. Call this method only once."""
        self._store.set(f"left/{self._rank}", "1")
        self._store.add("left", 1)

    def wait_until_ranks_exit(self, seconds: float) -> None:
        """Wait for at most `seconds` until all other ranks have left. This rank must have called `announce_exit`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._store.add("left", 0) < self._world:
            time.sleep(self.beat_s / 5)

    def activities(self, ranks: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the activities of `ranks`, by default of all ranks, without ranks that never wrote an activity."""
        keys = [f"at/{rank}" for rank in (range(self._world) if ranks is None else ranks)]
        try:
            if ranks != [self._reader]:  # the reader has certainly written its activity
                keys = self._keys_in_store(keys)
            texts = self._store.multi_get(keys) if keys else []
        except dist.DistError:
            return {}
        return {int(key.removeprefix("at/")): json.loads(text) for key, text in zip(keys, texts, strict=True)}

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have been silent for more than `silent_s` seconds and have not left the job.

        Only one rank, the reader, checks all other ranks and returns the silent ones. Every other rank returns an empty
        list and checks only the reader. If the reader is silent, another rank becomes the reader.
        """
        is_reader = self._is_reader()
        others = [rank for rank in range(self._world) if rank != self._rank] if is_reader else [self._reader]
        now = time.monotonic()
        if not self._seen:
            self._first_look = now
        for rank, at in self.activities(others).items():
            if self._seen.get(rank, (None,))[0] != at["beat"]:
                self._seen[rank] = (at["beat"], now)
        late = [rank for rank in others if rank in self._seen and now - self._seen[rank][1] > self.silent_s]
        if is_reader:
            self._left.update(r for r in late if r not in self._left and self._store.check([f"left/{r}"]))
            return [rank for rank in late if rank not in self._left]
        if late:
            # The reader is silent. One of the ranks that notice this becomes the next reader of all ranks.
            self._reader = int(self._store.compare_set("reader", str(self._reader), str(self._rank)))
            self._seen.clear()
        return []

    def wait_for_silent_ranks(self) -> list[int] | None:
        """Wait until the silent ranks are known, and return them; None if a failure is reported during the wait."""
        self._seen.clear()
        begin = time.monotonic()
        # Half of this time suffices to notice a dead reader, and the rest to find other silent ranks.
        while time.monotonic() - begin < 2.5 * self.silent_s:
            if self._store.check(["failure"]):
                return None
            silent = self.silent_ranks()
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
        return bool(self._seen) and all(
            since > self._first_look for rank, (_, since) in self._seen.items() if rank not in self._left
        )

    def _keys_in_store(self, keys: list[str]) -> list[str]:
        # Reading a key that is not set would wait for it.
        if self._store.check(keys):
            return keys
        half = len(keys) // 2
        return self._keys_in_store(keys[:half]) + self._keys_in_store(keys[half:]) if half else []
