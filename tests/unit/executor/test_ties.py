"""Parameters that several ranks hold: only those that are trained are summed."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.core.errors import ModelError
from planner.executor.run.placement import Place
from planner.executor.run.ties import TiedGradients

SHARED = [[(0, "words.weight"), (2, "head.weight")]]
PLACE = Place(rank=0, replica=0, num_replicas=1, position=0, num_devices=2, stages=(0,), order=(0, 1), num_stages=2)


def tied(*trained: str) -> TiedGradients:
    """Of a table that this rank holds with its first layer, and another one with its last."""
    table = nn.Parameter(nn.Embedding(8, 4).weight.detach(), requires_grad=bool(trained))
    return TiedGradients(SHARED, {"words.weight": table}, PLACE, [0, 0, 1], trained=trained)


def test_what_is_frozen_gets_no_gradient_and_no_message() -> None:
    """There is no process group here: a sum, or the making of a group, would be an error."""
    gradients = tied()
    gradients.begin()
    gradients.sum()
    assert list(gradients.parameters) == gradients.counted_elsewhere == []


def test_trained_under_one_name_and_frozen_under_another_is_refused() -> None:
    """In one process the frozen one shows what the other learns; on a rank of its own it would stay as it was."""
    with pytest.raises(ModelError, match=r'"head.weight" is frozen and .* "words.weight", which is trained') as refused:
        tied("words.weight")
    assert "--together" in refused.value.hint


def test_a_sum_is_let_go_of_by_the_thread_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of gloo's may hold it longer, and nobody would see it go: it is held until the next step."""
    monkeypatch.setattr(dist, "new_group", lambda _ranks: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    gradients = tied("words.weight", "head.weight")
    (table,) = gradients.parameters
    gradients.begin()
    table.grad = torch.ones(8, 4)
    kept = weakref.ref(table.grad)
    gradients.sum()
    table.grad = None
    assert kept() is not None
    gradients.begin()
    assert kept() is None
