"""Tensors that layers store in module attributes cross the cuts like returned ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.model.attributes import AttributeSnapshot
from planner.model.chain import chain_of
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from tests.support.cutting import compare, compare_all_ways
from tests.support.cutting import sequences as values
from tests.support.measure import loaded_model
from tests.zoo.real_model import loss_of

WIDTH = 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)
        self.aux_loss: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        share = torch.softmax(self.router(value), -1)
        self.aux_loss = share.mean((0, 1)).square().sum()
        return torch.tanh(self.expert(value)) * share[..., :1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, value: Tensor) -> Tensor:
        return value + self.moe(value)


class Mixture(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            value = block(value)
        return self.head(value), sum(block.moe.aux_loss for block in self.blocks)


def test_losses_in_attributes_cross_the_cuts() -> None:
    result = compare_all_ways(Mixture(), num_stages=4, sizes=(3, 5))
    assert result.chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
    assert result.crossing == [2, 3, 4, 5]


class Listed(Mixture):
    class Appending(Block):
        losses: list[Tensor]

        def forward(self, value: Tensor) -> Tensor:
            result = super().forward(value)
            assert self.moe.aux_loss is not None
            self.losses.append(self.moe.aux_loss)
            return result

    def __init__(self) -> None:
        super().__init__(self.Appending)
        self.losses: list[Tensor] = []
        for block in self.blocks:
            block.losses = self.losses

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        self.losses.clear()
        for block in self.blocks:
            value = block(value)
        return self.head(value), torch.stack(self.losses).sum()


@pytest.mark.slow
def test_losses_appended_to_a_list_cross_the_cuts() -> None:
    result = compare_all_ways(Listed(), num_stages=4, sizes=(3, 5))
    assert len(result.chain.names) == 5
    assert result.crossing == [2, 3, 4, 5]


class Noting(Mixture):
    class Reading(Block):
        grid: SimpleNamespace

        def forward(self, value: Tensor) -> Tensor:
            if self.grid.first is self:
                self.grid.count, self.grid.size, self.grid.hw = value.shape[0], value.shape, (5, 1)
                self.grid.notes = {"bias": self.moe.expert(value).mean(0), "mask": value[..., 0] > 0}
            assert self.grid.count == value.shape[0]
            assert self.grid.size == value.shape
            kept = self.grid.notes["mask"].unsqueeze(-1) * self.grid.hw[0]
            return super().forward(value) * kept + self.grid.notes["bias"]

    def __init__(self) -> None:
        super().__init__(self.Reading)
        grid = SimpleNamespace()
        grid.first = self.blocks[0]
        for block in self.blocks:
            vars(block)["grid"] = grid


class Grid(SimpleNamespace):
    """As a user would write it."""


def test_later_layers_read_shapes_and_tensors_that_the_first_layer_stored() -> None:
    """Stored batch sizes follow the size of the batch."""
    result = compare_all_ways(Noting(), num_stages=4, sizes=(3, 5))
    assert len(result.chain.names) == 5


def test_attributes_are_empty_after_a_stage_has_run() -> None:
    """Neither received tensors nor those that layers stored stay, which would keep their graphs alive."""
    model = Mixture()
    chain = chain_of(model, values, loss_of=lambda _size: loss_of)
    assert all(block.moe.aux_loss is None for block in model.blocks)
    value: Any = values(3)
    for layer in chain.layers:
        value = layer.module(value)
        assert all(block.moe.aux_loss is None for block in model.blocks)
    lists = Listed()
    chain = chain_of(lists, values, loss_of=lambda _size: loss_of)
    value = values(3)
    for layer in chain.layers:
        value = layer.module(value)
        assert lists.losses == []


@pytest.mark.slow
def test_recording_does_not_set_attributes() -> None:
    """A table that a module computes in its first forward is not computed from tensors without values."""

    class Lazy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None
            self.is_ready = False

        def forward(self, value: Tensor) -> Tensor:
            if not self.is_ready:
                self.table, self.is_ready = self.moe.expert.weight.detach().sum(0), True
            return super().forward(value) + self.table

    model = Mixture(Lazy)
    before = AttributeSnapshot(model.named_modules())
    chain_of(model, values)
    assert before.changes() == []
    assert compare_all_ways(model, num_stages=4, sizes=(3, 5)).crossing == [2, 3, 4, 5]


class Hidden:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Hiding(Mixture):
    class Inside(Block):
        def forward(self, value: Tensor) -> Tensor:
            result = super().forward(value)
            assert self.moe.aux_loss is not None
            self.hidden = Hidden(self.moe.aux_loss * 2)
            return result

    def __init__(self) -> None:
        super().__init__(self.Inside)
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        value = self.stem(value)
        for block in self.blocks:
            value = block(value)
        return self.head(value), sum(block.hidden.loss for block in self.blocks)


def test_missing_cuts_are_explained_and_warned_about() -> None:
    outline = chain_of(Hiding(), values).outline
    assert outline.names == ("stem", "blocks.0")
    assert outline.note_on_missing_cuts.startswith(
        'the model cannot be cut after 4 of 5 modules (after "blocks.0": a tensor made in blocks.0 (aten::mul)'
    )
    followed = chain_of(Mixture(), values).outline
    assert not followed.note_on_missing_cuts
    warned: list[str] = []
    loaded = loaded_model(Hiding(), values)
    profile_model(loaded, ProfilerOptions(micro_batch_sizes=(1,), repeats=2, time_budget_s=0.0), warn=warned.append)
    assert outline.note_on_missing_cuts in warned


def test_attribute_snapshot_finds_and_reverts_changes() -> None:
    """Changes that contain tensors are reverted, also in lists, dicts and nested objects."""
    model = Listed()
    model.losses.append(torch.ones(()))
    vars(model)["notes"] = {"a": 1, "b": Grid(deep=[1, 2])}
    before = AttributeSnapshot(model.named_modules())
    model.losses.append(torch.ones(()))
    notes = vars(model)["notes"]
    notes["a"], notes["c"] = 2, torch.ones(())
    notes["b"].deep[:] = [torch.ones(())]
    notes["b"].new = 4
    vars(model)["more"] = 5
    changes = {(change.keys, change.kind) for change in before.changes()}
    assert changes == {
        (("losses",), "extended"),
        (("notes", "a"), "set"),
        (("notes", "c"), "set"),
        (("notes", "b", "deep"), "replaced"),
        (("notes", "b", "new"), "set"),
        (("more",), "set"),
    }
    before.restore()
    assert {change.keys for change in before.changes()} == {("notes", "b", "new"), ("more",)}
    assert notes == {"a": 1, "b": Grid(deep=[1, 2], new=4)}
    assert len(model.losses) == 1


@pytest.mark.parametrize("sizes", [(1, 2), (6,)])
def test_returned_batch_sizes_follow_the_batch(sizes: tuple[int, ...]) -> None:
    """Returned ints and sizes have the current number of samples, not that of the recorded batch."""

    class Counting(Block):
        def forward(self, given: tuple[Tensor, int, torch.Size]) -> tuple[Tensor, int, torch.Size]:
            value, count, size = given
            assert count == value.shape[0]
            assert size == value.shape
            return super().forward(value / count), count, value.shape

    class Counted(Mixture):
        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            given: Any = value, value.shape[0], value.shape
            for block in self.blocks:
                given = block(given)
            return self.head(given[0] * given[1]), sum(block.moe.aux_loss for block in self.blocks)

    result = compare(Counted(Counting), values, loss_of, num_stages=5, sizes=sizes)
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5
