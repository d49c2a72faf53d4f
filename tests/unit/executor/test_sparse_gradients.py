"""Sparse gradients in a run: summed over ranks they are refused, and everything else takes them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.core.errors import ModelError
from planner.executor.run.gradients import dense_part
from planner.executor.run.placement import Place
from planner.executor.run.replicas import ReplicaGradients
from planner.executor.run.ties import TiedGradients


def table() -> nn.Embedding:
    """With a gradient of which one row comes twice."""
    words = nn.Embedding(10, 4, sparse=True)
    words(torch.tensor([1, 2, 1])).sum().backward()
    return words


def test_replicas_refuse_them() -> None:
    """Before anything is sent."""
    words = table()
    gradients = ReplicaGradients([words.parameters()], None, keeps_earlier=True)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="sparse, and cannot be summed over replicas"), gradients.last_backward(0):
        pass


def test_ties_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise, where another rank holds the parameter, too."""
    monkeypatch.setattr(dist, "new_group", lambda _ranks: None)
    place = Place(rank=0, replica=0, num_replicas=1, position=0, num_devices=2, stages=(0,), order=(0, 1), num_stages=2)
    words = table()
    shared = [[(0, "words.weight"), (2, "head.weight")]]
    names = ("words.weight", "head.weight")
    gradients = TiedGradients(shared, {"words.weight": words.weight}, place, [0, 0, 1], trained=names)
    with pytest.raises(ModelError, match="cannot be summed over ranks that share a parameter"):
        gradients.sum()


def test_their_norm_is_that_of_the_sum_by_row() -> None:
    """Clipping counts a row that comes twice as what it adds up to."""
    gradient = table().weight.grad
    assert gradient is not None
    assert float(dense_part(gradient).norm()) == float(gradient.to_dense().norm())
