"""Tests of parameters that several ranks have."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.device.meter import CpuMemoryMeter
from planner.executor.run.placement import ProcessPlace
from planner.executor.run.ties import TiedGradients

SHARED = [[(0, "words.weight"), (2, "head.weight")]]
PLACE = ProcessPlace(rank=0, replica=0, num_replicas=1, position=0, num_devices=2, stages=(0,), num_stages=2)


def tied(*trained: str) -> TiedGradients:
    """Return the ties of a table that this rank's first layer shares with another rank's last layer."""
    table = nn.Parameter(nn.Embedding(8, 4).weight.detach(), requires_grad=bool(trained))
    return TiedGradients(SHARED, {"words.weight": table}, PLACE, [0, 0, 1], trained=trained)


def test_frozen_tied_parameters_are_not_summed() -> None:
    gradients = tied()
    gradients.drop_copies()
    gradients.sum()
    assert list(gradients.parameters) == gradients.counted_elsewhere == []


def test_a_tied_parameter_without_a_gradient_on_any_rank_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """So weight decay does not change it. With a gradient on another rank, this one gets the sum."""
    on_another_rank = torch.tensor([0])

    def all_reduce(tensor: Tensor, **_: object) -> None:
        tensor.add_(on_another_rank if tensor.dtype == torch.int32 else 3.0)

    monkeypatch.setattr(dist, "new_group", lambda _ranks: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    gradients = tied("words.weight", "head.weight")
    (table,) = gradients.parameters
    gradients.sum()
    assert table.grad is None
    on_another_rank.fill_(1)
    gradients.sum()
    assert torch.equal(table.grad, torch.full((8, 4), 3.0))


def test_the_memory_of_a_sum_is_released_with_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of gloo, which refers to the summed tensor a little longer, could otherwise release it, uncounted."""
    held_by_gloo: list[Tensor] = []
    monkeypatch.setattr(dist, "new_group", lambda _ranks: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: held_by_gloo.append(tensor))
    gradients = tied("words.weight", "head.weight")
    (table,) = gradients.parameters
    table.grad = torch.ones(8, 4)
    gradients.sum()
    assert torch.equal(table.grad, torch.ones(8, 4))
    assert [tensor.untyped_storage().nbytes() for tensor in held_by_gloo[1:]] == [0]


def test_comparing_copies_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch converts what it sums to integers of 8 bytes, so a sum over the whole table would need twice its bytes."""
    monkeypatch.setattr(dist, "new_group", lambda _ranks: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor)
    table = nn.Parameter(torch.ones(8, 2**20))
    gradients = TiedGradients(SHARED, {"words.weight": table}, PLACE, [0, 0, 1], trained=["words.weight"])
    assert CpuMemoryMeter().measure(gradients.check_equal).peak_bytes < table.nbytes / 2
