"""Tests of values that ranks exchange through the store of their job."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import exchange
from planner.executor.keep.exchange import ValueExchange
from tests.support.cli import MODEL
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance
from tests.unit.executor.test_checkpoint import GROUPS, train
from tests.unit.executor.test_pipeline import balance_of


class _Shared:
    """A store whose clone is itself."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # torch lists not all that is public

    def clone(self) -> Any:
        return self.store


def run_on_all(count: int, act: Callable[[ValueExchange], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a function on all ranks, each a thread, and return their store."""
    shared = _Shared()
    monkeypatch.setattr(exchange, "job_store", lambda _: shared)
    ranks = [ValueExchange(rank, count) for rank in range(count)]
    threads = [threading.Thread(target=act, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    return shared.store


def test_the_first_rank_decides_from_the_values_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []

    def act(rank: ValueExchange) -> None:
        for number in range(20):
            value = f"{rank._rank}.{number}"
            decided.append(rank.decide(value, ",".join))
        rank.close()

    store = run_on_all(4, act, monkeypatch)
    assert sorted(decided) == sorted(4 * [f"0.{n},1.{n},2.{n},3.{n}" for n in range(20)])
    assert store.num_keys() <= 4


WITHOUT_GROUPS = """
import sys
import torch.distributed as dist
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints

steps = int(sys.argv[1])
pipeline = Pipeline("balance.yaml")
optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
dist.new_group = None
saved = Checkpoints(pipeline, optimizer, folder="saved", every=1, steps=steps, resume="auto")
saved._is_async = steps == 2
assert pipeline.step_index == steps - 1
for inputs, targets in pipeline.batches(steps):
    with pipeline.step(inputs, targets):
        optimizer.step()
    saved.step_done()
"""


@pytest.mark.slow
def test_checkpoints_create_no_process_group(tmp_path: Path) -> None:
    case = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(2, 3))
    write_balance(case, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(WITHOUT_GROUPS)
    for steps in ("1", "2", "3"):
        run_ranks(2, ["worker.py", steps], tmp_path)
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == [f"step-0000000{n}" for n in (1, 2, 3)]


def test_checkpoints_are_removed_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues while a thousand files are removed, and the run ends when they are."""
    threads = []
    checkpoints = sys.modules[Checkpoints.__module__]
    prune = checkpoints.remove_old_checkpoints

    def pruned(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        prune(*arguments)

    monkeypatch.setattr(checkpoints, "remove_old_checkpoints", pruned)
    path = balance_of(tmp_path, MODEL + GROUPS)
    train(path, 3, folder=str(tmp_path / "saved"), every=1, keep=1)
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    assert [entry.name for entry in (tmp_path / "saved").iterdir()] == ["step-00000003"]
