"""Tests that each start of a job has its own keys in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from planner.core.errors import TrainingError
from planner.executor.watch import store as store_module

SOON = timedelta(seconds=20)


def start(server: dist.TCPStore, world: int) -> list[str]:
    """Return the keys that all ranks agree on; the first rank comes last."""
    agreed = [""] * world

    def join(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=SOON)
        agreed[rank] = store_module._agree_on_name(own, rank, world, SOON)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(world))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return agreed


def test_every_start_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever each machine's launcher has counted, and whatever earlier starts left."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
    server.set("gpipe-plan/hello/1", "one that is gone")
    rounds = [start(server, 3) for _ in range(3)]
    assert all(len(set(agreed)) == 1 for agreed in rounds)
    assert len({agreed[0] for agreed in rounds}) == 3


@pytest.mark.slow
def test_ranks_that_do_not_join_are_named() -> None:
    """Other ranks name the first rank."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
    server.set("gpipe-plan/hello/1", "one that is gone")
    with pytest.raises(TrainingError, match=r"^rank 1, rank 2 did not join within 0\.5 s"):
        store_module._agree_on_name(server, 0, 3, timedelta(seconds=0.5))
    with pytest.raises(TrainingError, match=r"rank 0 did not join within 0\.5 s"):
        store_module._agree_on_name(server, 2, 3, timedelta(seconds=0.5))


@pytest.mark.slow
def test_awaited_ranks_are_printed_at_intervals(monkeypatch, capsys):
    monkeypatch.setattr(store_module, "_REPORTED_EVERY_S", 0.2)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
    with pytest.raises(TrainingError):
        store_module._agree_on_name(server, 0, 6, timedelta(seconds=1.0))
    lines = capsys.readouterr().err.splitlines()
    assert 1 < len(lines) < 5
    assert all(line.startswith("waiting for rank 1, rank 2, rank 3, 2 others to join for ") for line in lines)
