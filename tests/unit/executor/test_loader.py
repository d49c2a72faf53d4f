"""Tests of data loaders: equal order on every rank, and exact resuming within an epoch."""

# ruff: noqa: NPY002 - the global generator is what a loader draws from

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

from planner.core.errors import UsageError
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.run.loader import ResumableLoader, seeded_batches
from planner.model.load import Batch, load_module
from planner.model.seeding import example_mini_batch
from tests.support.cli import MODEL
from tests.unit.executor.test_checkpoint import GROUPS
from tests.unit.executor.test_pipeline import balance_of

DATA = torch.arange(24.0 * 8).reshape(24, 8).sin()


pytestmark = pytest.mark.usefixtures("one_process")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from all three generators for every sample."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return DATA[index] + noise, DATA[index, :4]


class Shuffled:
    """A user's iterable, shuffled each time it begins."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = np.random.permutation(24).tolist()
        random.shuffle(rows)
        for begin in range(0, 24, 8):
            part = DATA[rows[begin : begin + 8]]
            yield part, part[:, :4]


class Stateful(DataLoader[Any]):
    """A loader like torchdata's: its state is its generator's and a position, and beginning draws a seed."""

    resumed: dict[str, Any] | None = None

    def __iter__(self) -> Any:
        generator: Any = self.generator
        self.began = self.resumed["began"] if self.resumed else generator.get_state()
        if self.resumed:
            generator.set_state(self.began)
        self.order = torch.randperm(24, generator=generator).tolist()
        if not self.resumed:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        torch.empty((), dtype=torch.int64).random_()
        self.at = self.resumed["at"] if self.resumed else 0
        self.resumed = None
        return self._rest()

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = state

    def _rest(self) -> Iterator[Any]:
        while self.at < 24:
            part = DATA[self.order[self.at : self.at + 8]] + float(torch.rand(()))
            self.at += 8
            yield part, part[:, :4]


def plain() -> DataLoader[Any]:
    return DataLoader(TensorDataset(DATA, DATA[:, :4]), batch_size=8, shuffle=True)


def with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(DATA, DATA[:, :4]), batch_size=8, shuffle=True, generator=generator)


def noisy() -> DataLoader[Any]:
    """Return an augmented loader with a smaller last batch."""
    return DataLoader(Noisy(), batch_size=7, shuffle=True)


def stateful() -> Stateful:
    return Stateful(TensorDataset(DATA), generator=torch.Generator().manual_seed(3))


LOADERS: list[Callable[[], Iterable[Any]]] = [plain, with_generator, noisy, Shuffled, stateful]


def drawn(loader: ResumableLoader, count: int) -> list[list[float]]:
    """Return the next batches."""
    return [pair[0].flatten().tolist() for pair in islice(loader, count)]


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("done", [0, 1, 2, 3, 4, 6, 7])
def test_a_loader_is_resumed_at_its_position(make: Callable[[], Iterable[Any]], done: int) -> None:
    expected = drawn(ResumableLoader(make(), 5), 9)
    assert len({str(batch) for batch in expected}) == 9
    first = ResumableLoader(make(), 5)
    torch.manual_seed(done)
    got = drawn(first, done)
    state = first.state_dict()
    second = ResumableLoader(make(), 5)
    second.load_state_dict(state)
    random.seed(done)
    before = torch.get_rng_state()
    got += drawn(second, 9 - done)
    assert got == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", LOADERS)
def test_a_run_is_resumed_exactly_within_an_epoch(tmp_path: Path, make: Callable[[], Iterable[Any]]) -> None:
    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")

    def train(steps: int, **options: Any) -> list[float]:
        pipeline = Pipeline(path, seed=2)
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        saved = Checkpoints(pipeline, optimizer, steps=steps, **options)
        for inputs, targets in pipeline.batches(steps, make()):
            with pipeline.step(inputs, targets):
                optimizer.step()
                optimizer.zero_grad()
            saved.step_done()
        pipeline.close()
        return pipeline.losses

    whole = train(8)
    parts = [train(steps, folder=folder, resume="auto") for steps in (2, 4, 8)]
    assert [len(losses) for losses in parts] == [2, 2, 4]
    assert [loss for losses in parts for loss in losses] == whole


@pytest.mark.parametrize("stops", [(5,), (2, 5), (3, 5), (4, 5)])
def test_a_loader_of_a_later_phase_begins_at_its_first_batch(tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Also after a resume, and even if the run was saved at the end of the first phase."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")
    easy, hard = (
        [(torch.full((8, 8), float(n)), torch.zeros(8, 4)) for n in numbers] for numbers in ((0, 1, 2), (3, 4))
    )
    seen = []
    for stop in stops:
        pipeline = Pipeline(path)
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        saved = Checkpoints(pipeline, optimizer, steps=stop, folder=folder, resume="auto")
        for end, loader in ((3, easy), (5, hard)):
            for inputs, targets in pipeline.batches(min(stop, end), loader):
                seen.append(int(inputs[0, 0]))
                with pipeline.step(inputs, targets):
                    optimizer.step()
                    optimizer.zero_grad()
                saved.step_done()
        pipeline.close()
    assert seen == [0, 1, 2, 3, 4]


def part_of(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield three batches, only once."""
    return ((torch.full((8, 8), 10.0 * epoch + n), torch.zeros(8, 4)) for n in range(3))


def train_on_parts(path: Path, folder: Path, stop: int, batches: Callable[[Pipeline], Iterator[Batch]]) -> list[float]:
    """Train, or resume the training, until step `stop`, and return the first number of each mini-batch."""
    seen, pipeline = [], Pipeline(path)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    saved = Checkpoints(pipeline, optimizer, steps=stop, folder=str(folder), resume="auto")
    with closing(pipeline):
        for inputs, targets in batches(pipeline):
            seen.append(float(inputs[0, 0]))
            with pipeline.step(inputs, targets):
                optimizer.step()
                optimizer.zero_grad()
            saved.step_done()
    return seen


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_generators_that_are_not_all_passed_again_are_refused(tmp_path: Path, stop: int) -> None:
    """One that is not the checkpoint's would be taken for it, and batches would be lost."""

    def all_with_last_step(pipeline: Pipeline, end: int) -> Iterator[Batch]:
        for epoch in range(3):
            yield from pipeline.batches(min(end, 3 * epoch + 3), part_of(epoch))

    def from_epoch(pipeline: Pipeline) -> Iterator[Batch]:
        for epoch in range(pipeline.step_index // 3, 3):
            yield from pipeline.batches(3 * epoch + 3, part_of(epoch))

    def without_last_step(pipeline: Pipeline) -> Iterator[Batch]:
        for epoch in range(3):
            yield from pipeline.batches(9, part_of(epoch))

    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    seen = train_on_parts(path, folder, stop, lambda p: all_with_last_step(p, stop))
    for refused in (from_epoch, without_last_step):
        with pytest.raises(UsageError, match="resume"):
            train_on_parts(path, folder, 9, refused)
    seen += train_on_parts(path, folder, 9, lambda p: all_with_last_step(p, 9))
    assert seen == [0, 1, 2, 10, 11, 12, 20, 21, 22]


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_loaders_that_share_a_generator_resume_exactly(tmp_path: Path, stop: int) -> None:
    """Also if the run was saved at the end of a loader."""
    data = TensorDataset(DATA, DATA[:, :4])

    def shuffled(pipeline: Pipeline, end: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(3)
        for epoch in range(3):
            loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
            yield from pipeline.batches(min(end, 3 * epoch + 3), loader)

    path = balance_of(tmp_path, MODEL + GROUPS)
    whole = train_on_parts(path, tmp_path / "whole", 9, lambda p: shuffled(p, 9))
    parts = [train_on_parts(path, tmp_path / "parts", end, lambda p, end=end: shuffled(p, end)) for end in (stop, 9)]
    assert [*parts[0], *parts[1]] == whole


@pytest.mark.parametrize("stop", [3, 4])
def test_a_loader_after_a_phase_without_one_begins_at_its_first_batch(tmp_path: Path, stop: int) -> None:
    def phases(pipeline: Pipeline, end: int) -> Iterator[Batch]:
        yield from pipeline.batches(min(end, 3))
        yield from pipeline.batches(end, [*part_of(0), *part_of(1)])

    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    seen = [n for end in (stop, 9) for n in train_on_parts(path, folder, end, lambda p, end=end: phases(p, end))]
    assert seen[3:] == [0, 1, 2, 10, 11, 12]


def test_a_new_loader_for_each_epoch_is_shuffled_anew(tmp_path: Path) -> None:
    pipeline = Pipeline(balance_of(tmp_path))
    orders = []
    for epoch in range(2):
        pipeline.step_index = 3 * epoch
        orders.append([batch.inputs.tolist() for batch in pipeline.batches(3 * epoch + 3, Shuffled())])
    pipeline.close()
    assert orders[0] != orders[1]
    assert sorted(row for batch in orders[0] for row in batch) == sorted(row for batch in orders[1] for row in batch)


def test_resuming_with_a_different_loader_is_refused(tmp_path: Path) -> None:
    loader = ResumableLoader(plain(), 5)
    drawn(loader, 2)
    for other in (noisy(), stateful()):
        with pytest.raises(UsageError, match="the loader differs from the checkpoint"):
            ResumableLoader(other, 5).load_state_dict(loader.state_dict())
    pipeline = Pipeline(balance_of(tmp_path, MODEL + GROUPS))
    pipeline.load_state_dict({**pipeline.state_dict(), "step_index": 2, "loader": loader.state_dict()})
    with pytest.raises(UsageError, match="`batches` got no loader"):
        next(pipeline.batches(4))
    pipeline.close()


def test_a_sampler_in_a_batch_sampler_gets_each_epoch() -> None:
    orders = []
    for is_inside in (True, False):
        dataset = TensorDataset(torch.arange(24.0))
        sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
        inside = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 12, drop_last=False))
        loader = ResumableLoader(inside if is_inside else DataLoader(dataset, 12, sampler=sampler), 5)
        orders.append([batch[0].tolist() for batch in islice(loader, 2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_empty_loaders_are_refused_and_iterators_end() -> None:
    with pytest.raises(UsageError, match=r"a list of 0 batches returned no batch"):
        drawn(ResumableLoader([], 5), 1)
    once = ((torch.ones(8, 8) * n, torch.ones(8, 4)) for n in range(3))
    assert len(drawn(ResumableLoader(once, 5), 9)) == 3


def test_batches_of_any_type_are_returned() -> None:
    given = [np.arange(3), None, torch.arange(3)]
    epoch = list(islice(ResumableLoader(given, seed=0), 3))
    assert all(one is other for one, other in zip(epoch, given, strict=True))


def test_no_batch_is_held_while_it_is_used() -> None:
    """It would take memory that no plan counts."""
    for batches in (iter(ResumableLoader(plain(), 5)), seeded_batches(plain(), 5)):
        pair = next(batches)
        held = weakref.ref(pair[0])
        del pair
        gc.collect()
        assert held() is None


def test_example_batches_depend_on_the_seed_and_the_step_only() -> None:
    def example_batch(size: int) -> tuple[Tensor, Tensor]:
        numpy = torch.from_numpy(np.random.rand(size, 4)).float()
        return torch.rand(size, 4) + numpy, torch.full((size,), random.random())

    model = load_module(torch.nn.Linear(4, 4), example_batch=example_batch, loss_fn=torch.nn.functional.mse_loss)
    state = random.getstate()
    first = example_mini_batch(model, 2, seed=3, step=1)
    assert random.getstate() == state
    random.random()
    for step, is_equal in ((1, True), (2, False)):
        other = example_mini_batch(model, 2, seed=3, step=step)
        assert torch.equal(first.inputs, other.inputs) == is_equal
        assert torch.equal(first.targets, other.targets) == is_equal
