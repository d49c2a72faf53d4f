"""Ghost tensors have the shape and strides of the tensors that they replace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.chain import chain_of
from planner.model.ghosts import Ghost, NeedsValuesError, ghost_like, storage_key
from planner.model.nests import tensors_in
from planner.model.stand_ins import StandInFactory


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(1),
        lambda t: t.squeeze_(0),
        lambda t: t.swapaxes_(0, 2),
        lambda t: t.as_strided_((3, 2), (1, 3)),
    ],
    ids=["transpose", "unsqueeze", "squeeze", "swapaxes", "as_strided"],
)
def test_in_place_changes_of_shape_change_ghosts(change: Callable[[Tensor], object]) -> None:
    tensor = torch.randn(1, 4, 5)
    ghost = ghost_like(tensor, torch.device("cpu"))
    change(tensor)
    change(ghost)
    assert (ghost.shape, ghost.stride()) == (tensor.shape, tensor.stride())
    assert (ghost * 2).shape == tensor.shape


NEW_RESULTS = {
    "sum": lambda t: t.sum(1, keepdim=True),
    "mean of integers": lambda t: t.long() / 2,
    "product": lambda t: t.transpose(1, 2) @ t,
    "largest": lambda t: t.max(1),
    "with a real tensor": lambda t: t * torch.ones(3, 1, 1, dtype=torch.float64),
    "several": lambda t: torch.cat([t, t[:, 1:]], 1),
    "normalization": lambda t: nn.functional.layer_norm(t, (5,)),
}


@pytest.mark.parametrize("compute", NEW_RESULTS.values(), ids=NEW_RESULTS)
def test_repeated_operators_give_the_same_ghosts(compute: Callable[[Tensor], object]) -> None:
    """The first call asks torch for the shapes, and the second one remembers them."""
    expected = [(t.shape, t.stride(), t.dtype) for t in tensors_in(compute(torch.ones(3, 4, 5)))]
    for origin in ("first", "second"):
        found = tensors_in(compute(ghost_like(torch.ones(3, 4, 5), torch.device("cpu"), origin)))
        assert [(t.shape, t.stride(), t.dtype) for t in found] == expected
        assert {t.origin for t in found if isinstance(t, Ghost)} == {origin}


VIEWS = {
    "slice": lambda t: t[:, 1:3],
    "select": lambda t: t[1],
    "transpose": lambda t: t.transpose(0, 2),
    "expand": lambda t: t[:, :1].expand(3, 6, 5),
    "view of a view": lambda t: t[1:].transpose(1, 2)[:, 2:].squeeze(0),
    "chunk": lambda t: t.chunk(2, dim=1),
    "unbind": lambda t: t.unbind(2),
    "detach": lambda t: t.detach(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_repeated_views_of_ghosts_are_those_of_torch(view: Callable[[Tensor], object]) -> None:
    """Views of the second ghost are remembered, and so are views of views, at another offset and of another base."""
    real = torch.ones(3, 4, 5)
    expected = [(t.shape, t.stride(), t.storage_offset()) for t in tensors_in(view(real))]
    for _ in range(3):
        ghost = ghost_like(real, torch.device("cpu")) * 2
        found = list(tensors_in(view(ghost)))
        assert [(t.shape, t.stride(), t.storage_offset()) for t in found] == expected
        assert {storage_key(t) for t in found} == {storage_key(ghost)}
        fakes = [t.fake_tensor for t in found if isinstance(t, Ghost)]
        assert [(t.shape, t.stride(), t.storage_offset()) for t in fakes] == expected


def test_a_write_into_a_remembered_view_changes_no_other_ghost() -> None:
    for _ in range(2):
        ghost = ghost_like(torch.ones(4, 4), torch.device("cpu"))
        half = ghost[2:]
        ghost.t_()
        half.add_(1)
        assert (ghost.stride(), half.stride(), half.storage_offset()) == ((1, 4), (4, 1), 8)
        assert storage_key(half) == storage_key(ghost)


def test_other_ghosts_have_other_storages() -> None:
    ghosts = [ghost_like(torch.ones(2, 2), torch.device("cpu")) for _ in range(2)]
    sums = [ghost + 1 for ghost in ghosts]
    assert len({*map(storage_key, ghosts), *map(storage_key, sums)}) == 4


def test_changed_strides_and_options_change_the_results_of_ghosts() -> None:
    ghost = ghost_like(torch.ones(2, 3), torch.device("cpu"))
    assert (ghost + 1).stride() == (3, 1)
    assert (ghost.t() + 1).stride() == (1, 3)
    assert ghost.argmax(1).shape == (2,)
    assert ghost.argmax(1, keepdim=True).shape == (2, 1)
    assert (ghost == 1).dtype == torch.bool
    assert (ghost.long() + 1).dtype == torch.int64
    assert (ghost.long() + 1.0).dtype == torch.float32


class Stack(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(8, 8, batch_first=True) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value, _ = layer(value)
        return value


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_boundaries_of_batch_first_recurrent_layers_begin_with_samples(kind: Callable[..., nn.Module]) -> None:
    """A GRU ends with `transpose_`, which once gave (words, b, 8) instead of (b, words, 8)."""
    outline = chain_of(Stack(kind), lambda batch: torch.randn(batch, 5, 8)).outline
    shapes = [[tuple(t.shape) for t in outline.meta_inputs(n, 3)] for n in (1, 2)]
    assert shapes == [[(3, 5, 8)], [(3, 5, 8)]]


def test_reading_a_value_of_another_stage_names_its_layer() -> None:
    with pytest.raises(ModelError, match=r'code between modules, .* reads values of "blocks.0"') as refused:
        ghost_like(torch.empty(2), torch.device("cpu"), "blocks.0").sum().item()
    assert "move this code into a module" in refused.value.hint


class ReadsGhost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        ghost = ghost_like(self.weight, torch.device("cpu"))
        return x + ghost.data.new(ghost.size(0), 3).zero_()


def test_a_traced_forward_may_read_sizes_of_ghosts() -> None:
    """`profile` counts floating-point operations with `torch.jit.trace`, and an error in it once ended the process."""
    _, result = torch.jit._get_trace_graph(ReadsGhost(), (torch.ones(2, 3),))
    assert result.shape == (2, 3)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos", torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.lin, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x + self.pos * self.scale)
        return self.out(x)


def test_an_error_while_tensors_become_stand_ins_restores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Positions()
    stage = chain_of(model, lambda batch: torch.randn(batch, 4)).stage(1, 2)

    def fail_at_parameters(_self: StandInFactory, _name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            raise NeedsValuesError
        return torch.zeros(4)

    monkeypatch.setattr(StandInFactory, "parameter", fail_at_parameters)
    with pytest.raises(NeedsValuesError):
        stage((torch.randn(2, 4),))
    assert torch.equal(model.get_buffer("pos"), torch.ones(4))
