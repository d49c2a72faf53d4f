"""What layers leave behind in attributes crosses the cuts, like what they return."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.model.attributes import AttributeSnapshot
from planner.model.chain import chain_of
from planner.model.nests import tensors_in
from planner.profile import ProfilerOptions, profile_model
from tests.support.cutting import Compared, compare
from tests.support.measure import loaded_model

WIDTH = 8


def loss_of(output: Any) -> Tensor:
    """In which every number has its own part."""
    floats = [t for t in tensors_in(output) if t.requires_grad]
    return torch.stack([(t.flatten() * torch.cos(torch.arange(t.numel()))).mean() for t in floats]).sum()


def values(batch: int) -> Tensor:
    """Inputs of most models here."""
    return torch.randn(batch, 5, WIDTH)


def compared(model: nn.Module, num_stages: int = 4, **options: Any) -> Compared:
    """Every way of cutting and running it gives the same numbers, also for other sizes than the recorded ones."""
    for granularity in ("fine", "coarse"):
        for recompute in (True, False):
            result = compare(
                model,
                values,
                loss_of,
                granularity=granularity,
                recompute=recompute,
                num_stages=num_stages,
                sizes=(3, 5),
                **options,
            )
            assert result.loss_error < 1e-6
            assert result.gradient_error < 1e-5
    return result


class Experts(nn.Module):
    """It notes how evenly it routes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)
        self.aux_loss: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        """(b, 5, WIDTH) to (b, 5, WIDTH)."""
        share = torch.softmax(self.router(value), -1)
        self.aux_loss = share.mean((0, 1)).square().sum()
        return torch.tanh(self.expert(value)) * share[..., :1]


class Block(nn.Module):
    """Experts with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, value: Tensor) -> Tensor:
        """(b, 5, WIDTH) to (b, 5, WIDTH)."""
        return value + self.moe(value)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """It adds the losses of all its blocks at the end."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """What it computes, and the sum of the losses."""
        for block in self.blocks:
            value = block(value)
        return self.head(value), sum(block.moe.aux_loss for block in self.blocks)  # type: ignore[return-value]


def test_losses_in_attributes_cross_the_cuts() -> None:
    """One number of every layer in front."""
    result = compared(Mixture())
    assert result.chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
    assert result.crossing == [2, 3, 4, 5]


class Listed(Mixture):
    """The blocks append to one list, which is emptied first."""

    class Appending(Block):
        """Its loss is an item."""

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
        """The same."""
        self.losses.clear()
        for block in self.blocks:
            value = block(value)
        return self.head(value), torch.stack(self.losses).sum()


def test_losses_in_a_list_cross_the_cuts() -> None:
    """Every item once."""
    result = compared(Listed())
    assert len(result.chain.names) == 5
    assert result.crossing == [2, 3, 4, 5]


class Noting(Mixture):
    """The first block notes shapes and a tensor that later ones read, in an object that all hold."""

    class Reading(Block):
        """It notes what nobody did before."""

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


def test_what_the_first_layer_notes_for_later_ones_is_there() -> None:
    """Numbers too, those that count samples as many as there are."""
    result = compared(Noting())
    assert len(result.chain.names) == 5


def test_nothing_is_kept_when_a_stage_has_run() -> None:
    """Neither what was received for attributes nor what layers put there, with all that it was computed from."""
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
def test_finding_the_layers_leaves_attributes_alone() -> None:
    """What a module computes once, when it first runs, is not computed from tensors without values."""

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
    assert compared(model).crossing == [2, 3, 4, 5]


class Hidden:
    """It lets nobody look inside."""

    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Hiding(Mixture):
    """Its blocks leave their losses where nobody finds them."""

    class Inside(Block):
        """In an object that is not looked into."""

        def forward(self, value: Tensor) -> Tensor:
            result = super().forward(value)
            assert self.moe.aux_loss is not None
            self.hidden = Hidden(self.moe.aux_loss * 2)
            return result

    def __init__(self) -> None:
        super().__init__(self.Inside)
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The same."""
        value = self.stem(value)
        for block in self.blocks:
            value = block(value)
        return self.head(value), sum(block.hidden.loss for block in self.blocks)  # type: ignore[return-value]


def test_why_there_are_few_cuts_is_told() -> None:
    """There are some, so nobody would look for the reason."""
    outline = chain_of(Hiding(), values).outline
    assert outline is not None
    assert outline.names == ("stem", "blocks.0")
    assert outline.note_on_missing_cuts.startswith(
        'the model cannot be cut after 4 of 5 modules (after "blocks.0": a tensor made in blocks.0 (aten::mul)'
    )
    followed = chain_of(Mixture(), values).outline
    assert followed is not None
    assert not followed.note_on_missing_cuts
    warned: list[str] = []
    loaded = loaded_model(Hiding(), values)
    profile_model(loaded, ProfilerOptions(micro_batch_sizes=(1,), repeats=2, time_budget_s=0.0), warn=warned.append)
    assert outline.note_on_missing_cuts in warned


def test_attributes_are_put_back() -> None:
    """Lists, dicts and objects within them too, where tensors are among what is new."""
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
    told = {(change.keys, change.kind) for change in before.changes()}
    assert told == {
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
def test_numbers_of_samples_that_layers_return_are_those_of_the_batch(sizes: tuple[int, ...]) -> None:
    """Not of the batch that was recorded."""

    class Counting(Block):
        def forward(self, given: tuple[Tensor, int, torch.Size]) -> tuple[Tensor, int, torch.Size]:  # type: ignore[override]
            value, count, size = given
            assert count == value.shape[0]
            assert size == value.shape
            return super().forward(value / count), count, value.shape

    class Counted(Mixture):
        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            given: Any = value, value.shape[0], value.shape
            for block in self.blocks:
                given = block(given)
            return self.head(given[0] * given[1]), sum(block.moe.aux_loss for block in self.blocks)  # type: ignore[return-value]

    result = compare(Counted(Counting), values, loss_of, num_stages=5, sizes=sizes)
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5
