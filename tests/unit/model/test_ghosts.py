"""Ghost tensors have the shape and strides of the tensors that they replace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.chain import chain_of
from planner.model.ghosts import NeedsValuesError, ghost_like
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
