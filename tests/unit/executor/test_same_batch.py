"""Tests that ranks refuse mini-batches of different samples."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from planner.core.errors import UsageError
from planner.executor.run.loader import does_sampler_split_data
from planner.executor.run.placement import ProcessPlace
from planner.executor.run.same_batch import BatchChecksums
from planner.model.load import Batch
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

TWO = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(2, 3))
STAGE = ProcessPlace(rank=1, replica=0, num_replicas=1, position=1, num_devices=2, stages=(1,), num_stages=2)
REPLICA = replace(STAGE, replica=1, num_replicas=2, position=0, num_devices=1, stages=(0,), num_stages=1)
DATA = TensorDataset(torch.arange(8.0))

TRAIN = """
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from planner.executor import Pipeline
from planner.executor.watch.failure import FailureWatch

with FailureWatch(60.0) as watch:
    pipeline = Pipeline("balance.yaml", watch=watch)
    data = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(data, data.flip(0))
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
    how = sys.argv[1]
    if how == "loader":
        batches = pipeline.batches(2, loader)
    elif how == "own_part":
        batches = (pipeline.own_part(*pair) for pair in loader)
    else:
        batches = loader
    for inputs, targets in batches:
        with pipeline.step(inputs, targets) as loss:
            pass
    pipeline.close()
    Path(f"trained-{pipeline.rank}").write_text(f"{len(pipeline.losses)} {loss}")
"""


def test_a_sampler_that_splits_over_stages_is_refused() -> None:
    """A sampler over a single part is accepted."""
    for loader in (
        DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1)),
        DataLoader(DATA, batch_sampler=torch.utils.data.BatchSampler(DistributedSampler(DATA, 2, 1), 2, False)),
    ):
        with pytest.raises(UsageError, match="rank 1 part 1 of 2 of the data, but the ranks are stages of one"):
            does_sampler_split_data(loader, STAGE)
    assert not does_sampler_split_data(DataLoader(DATA, sampler=DistributedSampler(DATA, 1, 0)), STAGE)
    assert not does_sampler_split_data(DataLoader(DATA, shuffle=True), STAGE)


def test_a_sampler_over_replicas_must_be_that_of_the_replica() -> None:
    assert does_sampler_split_data(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1)), REPLICA)
    for number, rank in ((2, 0), (4, 1)):
        with pytest.raises(UsageError, match=rf"part {rank} of {number} .* belongs to replica 1 of 2") as refused:
            does_sampler_split_data(DataLoader(DATA, sampler=DistributedSampler(DATA, number, rank)), REPLICA)
        assert "num_replicas=pipeline.place.num_replicas, rank=pipeline.place.replica" in refused.value.hint


def test_placeholders_of_inputs_have_no_checksum() -> None:
    """Inputs on the meta device or all zero are not compared."""
    batch = Batch(torch.empty(4, 2, device="meta"), {"a": torch.zeros(4), "b": torch.ones(4)})
    assert BatchChecksums.of(batch, is_whole=True, reads_all=True) == (0, 0, True)
    real = BatchChecksums.of(Batch(torch.arange(4.0), torch.arange(4)), is_whole=False, reads_all=True)
    assert 0 != real.inputs != real.targets != 0


def test_all_elements_are_compared_once() -> None:
    """Later, only the first elements of two samples are compared."""
    data = torch.arange(400.0).reshape(4, 100)
    other = data.clone()
    other[1, 50] += 1
    for reads_all in (True, False):
        one, two = (BatchChecksums.of(Batch(x, data), is_whole=True, reads_all=reads_all) for x in (data, other))
        assert one.differ_from(two) == reads_all


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.zeros(3), torch.ones(3)),
        (torch.arange(4).reshape(2, 2), torch.arange(4)),
        (torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse()),
    ],
    ids=["scalar", "constant", "shape", "sparse"],
)
def test_the_first_comparison_reads_every_kind_of_tensor(one: torch.Tensor, other: torch.Tensor) -> None:
    """A tensor of equal elements is a placeholder only if all tensors of the value are."""
    sums = [BatchChecksums.of(Batch([DATA[:][0], x], None), is_whole=True, reads_all=True) for x in (one, other)]
    assert sums[0].differ_from(sums[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loader", "own_part", "step"])
def test_ranks_with_different_samples_do_not_train(tmp_path: Path, how: str) -> None:
    write_balance(TWO, tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(TRAIN)
    with pytest.raises(AssertionError, match="would belong to different samples") as failed:
        run_ranks(2, ["worker.py", how], tmp_path)
    expected = "gives rank" if how == "loader" else "rank 1 has another mini-batch at step 0 than a rank before it"
    assert expected in str(failed.value)
    assert not list(tmp_path.glob("trained-*"))


@pytest.mark.slow
def test_replicas_that_draw_different_mini_batches_do_not_train(tmp_path: Path) -> None:
    write_balance(replace(TWO, balance=(5,), replicas=2, batch=16), tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(TRAIN)
    with pytest.raises(AssertionError, match="has another mini-batch at step 0 than rank"):
        run_ranks(2, ["worker.py", "own_part"], tmp_path)


@pytest.mark.slow
def test_a_sampler_over_replicas_trains(tmp_path: Path) -> None:
    """Each replica trains on its part, and all report the loss of both."""
    write_balance(replace(TWO, balance=(5,), replicas=2, batch=16), tmp_path / "balance.yaml")
    (tmp_path / "worker.py").write_text(TRAIN)
    run_ranks(2, ["worker.py", "loader"], tmp_path)
    trained = [path.read_text() for path in tmp_path.glob("trained-*")]
    assert len(trained) == 2
    assert len(set(trained)) == 1
    assert trained[0].startswith("2 ")
