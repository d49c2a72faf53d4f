"""Tests of the load that the watches of many ranks put on their common store."""

import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist

from planner.executor.watch import failure, liveness
from planner.executor.watch.activity import ANY, RankActivity
from planner.executor.watch.explain import error_of_hang
from planner.executor.watch.failure import FailureWatch
from planner.executor.watch.liveness import Heartbeats
from tests.unit.executor.test_failure import sent_activity


class CountingStore:
    """A store in this process that counts the keys of all operations."""

    def __init__(self) -> None:
        self._store = dist.HashStore()  # torch lists not all that is public
        self.count = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return an operation of the store."""
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.count += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return operation(*arguments)

        return counted


class Job:
    """Ranks that beat while one of them looks, until they are killed; the test sets the clock."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now_s = CountingStore(), 1000.0
        self.ranks = [Heartbeats(self.store, rank, count) for rank in range(count)]
        self.killed: set[int] = set()
        monkeypatch.setattr(liveness.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(liveness.time, "sleep", self.sleep)
        self.sleep(0.0)

    def sleep(self, seconds: float) -> None:
        """Let time pass, with a beat of every living rank."""
        self.now_s += seconds
        for rank, signs in enumerate(self.ranks):
            if rank not in self.killed:
                signs.write(RankActivity())


Watches = Callable[[int, CountingStore], list[FailureWatch]]


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watches]:
    """Return a function that makes the watches of all ranks of a job, without their threads."""
    made: list[FailureWatch] = []

    def make(count: int, store: CountingStore) -> list[FailureWatch]:
        monkeypatch.setattr(failure, "_store_of_all", lambda: store)
        monkeypatch.setattr(failure, "_is_launched", lambda: True)
        for rank in range(count):
            monkeypatch.setattr(failure, "rank_and_world_size", lambda rank=rank: (rank, count))
            made.append(FailureWatch(60.0))
        return made[-count:]

    yield make
    for watch in made:
        for end in watch._wake:
            end.close()


def keys_of_a_beat(ranks: list[tuple[FailureWatch, Heartbeats]], store: CountingStore) -> int:
    """Return the number of keys that one beat of all ranks reads or writes."""
    before = store.count
    for watch, signs in ranks:
        signs.write(watch.activity)
        watch._look(store, signs)
    return store.count - before


@pytest.mark.parametrize("when", ["at rest", "waiting", "signalled"])
def test_keys_of_a_beat_grow_linearly_with_ranks(watches: Watches, when: str) -> None:
    keys = {}
    for count in (10, 160):
        store = CountingStore()
        ranks = [(w, Heartbeats(store, r, count)) for r, w in enumerate(watches(count, store))]
        keys_of_a_beat(ranks, store)
        for watch, _ in ranks:
            watch.saves_on_stop = True
            if when == "signalled":
                watch._note_signal(signal.SIGTERM)
            if when == "waiting":
                watch.activity.begin("a checkpoint", waits_for=ANY)
                watch.activity._since -= 20.0
        keys[count] = max(keys_of_a_beat(ranks, store) for _ in range(3)) / count
    assert keys[160] < 1.5 * keys[10]
    assert keys[160] <= {"at rest": 2, "waiting": 3, "signalled": 11}[when]


def test_beats_of_all_ranks_are_bounded_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 1,000 operations in any second with any number of ranks. Small jobs beat faster."""
    monkeypatch.setattr(liveness.time, "monotonic", lambda: 1000.0)
    for count in (2, 250, 1000, 10_000):
        ranks = [Heartbeats(None, rank, count) for rank in range(count)]
        first_s, beat_s = sorted(rank.until_next_beat_s() for rank in ranks), ranks[0].beat_s
        times_s = [at + n * beat_s for n in range(round(2 / beat_s) + 1) for at in first_s]
        assert max(2 * sum(begin <= at < begin + 1 for at in times_s) for begin in times_s[:: count // 2]) <= 1100
    assert Heartbeats(None, 0, 250).silent_s == 3.0


def test_beats_stay_spread_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store answers all waiting ranks at once."""
    for answered_s in (1000.0, 1000.3, 1001.9):
        monkeypatch.setattr(liveness.time, "monotonic", lambda answered_s=answered_s: answered_s)
        waits_s = sorted(Heartbeats(None, rank, 1000).until_next_beat_s() for rank in range(1000))
        assert waits_s[0] >= 0.0
        assert waits_s[-1] < 2.0
        assert all(after - before == pytest.approx(2.0 / 1000) for before, after in pairwise(waits_s))


def test_a_rank_waits_before_its_first_look(watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks start together, but must not look together."""
    waits_s: list[float] = []

    def wait(watch: FailureWatch, seconds: float) -> None:
        waits_s.append(seconds)
        if len(waits_s) == 2:
            watch._over.set()

    monkeypatch.setattr(FailureWatch, "_record_signals_for", wait)
    monkeypatch.setattr(liveness.time, "monotonic", lambda: 1000.0)
    store = CountingStore()
    (*_, last) = watches(4, store)
    last._run(store)
    assert waits_s == [0.5 * 3 / 4, 0.5 * 3 / 4]


def test_a_signal_does_not_end_the_wait_for_the_next_beat(watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher sends it to all ranks at once."""
    (watch,) = watches(1, CountingStore())
    watch._wake[1].send(bytes([signal.SIGTERM]))
    ready = [[watch._wake[0]], []]
    monkeypatch.setattr(failure.select, "select", lambda *_: (ready.pop(0), [], []))
    watch._record_signals_for(60.0)
    assert watch._signal == signal.SIGTERM
    assert not ready


def test_one_rank_names_the_silent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for its report, or return nothing."""
    job = Job(8, monkeypatch)
    job.killed = {2, 5}
    assert job.ranks[0].wait_for_silent_ranks() == [2, 5]
    assert job.ranks[3].wait_for_silent_ranks() == []
    job.store.set("failure", "0")
    assert job.ranks[3].wait_for_silent_ranks() is None


def test_a_dead_reader_is_replaced_and_named(watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other dead ranks of its machine."""
    job = Job(12, monkeypatch)
    assert job.ranks[4].wait_for_silent_ranks() == []
    job.killed = {4, 5, 6, 7}
    assert job.ranks[0].wait_for_silent_ranks() == [4, 5, 6, 7]
    watch = watches(12, job.store)[0]
    message = watch._gone([4, 5, 6, 7], job.ranks[0]).message
    assert message.startswith("rank 4 and rank 5 and rank 6 and 1 others give no sign of life")


def test_a_rank_that_has_left_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(4, monkeypatch)
    job.ranks[1].announce_exit()
    job.killed = {1}
    assert job.ranks[0].wait_for_silent_ranks() == []


def test_messages_name_the_three_ranks_that_wait_longest() -> None:
    positions = {rank: {**sent_activity(f"stage {rank}", ANY), "idle_s": float(rank)} for rank in range(1000)}
    message = error_of_hang(positions, 60.0).message
    assert message.count(" waits in ") == 3
    assert "stage 997 waits" in message
    assert message.endswith("; 997 others")


def test_all_ranks_of_a_large_job_stop_after_the_same_step(watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank decides. Without a signal, no step costs an operation."""
    monkeypatch.setattr(failure, "_FEW_RANKS", 2)
    store = CountingStore()
    ranks = [(w, Heartbeats(store, r, 3)) for r, w in enumerate(watches(3, store))]
    for watch, _ in ranks:
        watch.saves_on_stop = True
    before = store.count
    assert [watch.stop_signal(1) for watch, _ in ranks] == [0, 0, 0]
    assert store.count == before
    ranks[2][0]._note_signal(signal.SIGTERM)  # a scheduler may send it to one process
    ranks[2][0]._signalled -= 1.0
    keys_of_a_beat(ranks, store)
    assert ranks[0][0].stop_signal(2) == 0
    keys_of_a_beat(ranks, store)
    assert [watch.stop_signal(3) for watch, _ in ranks] == [0, 0, 0]
    assert [watch.stop_signal(4) for watch, _ in ranks] == [signal.SIGTERM] * 3


def test_a_small_job_stops_after_the_next_step(watches: Watches) -> None:
    """Its ranks read the decision after every step, without waiting for a beat."""
    ranks = watches(3, CountingStore())
    ranks[0]._note_signal(signal.SIGTERM)
    assert [watch.stop_signal(1) for watch in ranks] == [0, 0, 0]
    assert [watch.stop_signal(2) for watch in ranks] == [signal.SIGTERM] * 3
