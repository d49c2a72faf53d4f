"""Tests of weights and sizes of micro-batches."""

from collections import UserDict
from typing import Any

import pytest
import torch

from planner.core.errors import ModelError, UsageError
from planner.executor.run.losses import loss_counts, loss_weights_of_parts, zero_loss_of
from planner.executor.run.parts import MiniBatchPart, count_samples, micro_batches_of, mini_batch_parts
from planner.model.label_counts import label_count
from planner.model.load import Batch


def test_weights_are_fractions_of_the_mini_batch() -> None:
    parts = [MiniBatchPart(Batch(None, None), 3, 2), MiniBatchPart(Batch(None, None), 1, 1)]
    assert loss_weights_of_parts(parts, [2, 2, 0, 4], 8) == [(parts[0], 0, [0.25, 0.25, 0.0]), (parts[1], 3, [0.5])]
    assert [weights for _, _, weights in loss_weights_of_parts(parts, [0.0] * 4, 0)] == [[0.0] * 3, [0.0]]


def test_loss_count_of_the_model_file_is_used() -> None:
    targets = [torch.tensor([1, -1]), torch.tensor([-1, -1])]
    assert loss_counts(lambda t: (t >= 0).sum(), targets, "model.py:build_model") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("count", "message"),
    [(-1, "returned -1"), (float("nan"), "returned nan"), (None, "`loss_count"), ("x", "`loss_count")],
)
def test_invalid_loss_counts_are_refused_with_an_example(count: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loss_counts(lambda _: count, [None], "model.py:build_model")


def test_labels_without_values_cannot_be_counted() -> None:
    """A rank must pass its part of a mini-batch, in which the last stage has labels with values."""
    with pytest.raises(UsageError, match="labels of a mini-batch are on the meta device") as refused:
        label_count({"labels": torch.ones(2, 3, device="meta")}, "all")
    assert "`inputs, targets = pipeline.own_part(inputs, targets)`" in refused.value.hint
    assert label_count({"labels": torch.tensor([[1, -100, 2]])}, "all") == 2.0


def test_micro_batches_of_weight_zero_have_zero_gradients() -> None:
    """Also if outputs are infinite."""
    output = torch.tensor([float("inf"), float("nan"), 1.0], requires_grad=True)
    loss = zero_loss_of({"logits": output, "classes": torch.ones(2, dtype=torch.int64)})
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(output.grad, torch.zeros(3))


@pytest.mark.parametrize(
    ("size", "expected"), [(8, [(4, 2)]), (7, [(3, 2), (1, 1)]), (4, [(2, 2)]), (1, [(1, 1)]), (2, [(1, 2)])]
)
def test_a_smaller_mini_batch_has_fewer_micro_batches(size: int, expected: list[tuple[int, int]]) -> None:
    """The last one may be smaller. Every sample is used once."""
    batch = Batch({"a": torch.arange(size), "b": 3}, torch.arange(size, device="meta"))
    parts = list(mini_batch_parts(batch, size, 2))
    assert [(part.micro_batches, part.micro_batch_size) for part in parts] == expected
    pieces = [piece["a"] for part in parts for piece in micro_batches_of(part.batch.inputs, part.micro_batches)]
    assert torch.equal(torch.cat(pieces), torch.arange(size))
    targets = [x for part in parts for x in micro_batches_of(part.batch.targets, part.micro_batches)]
    assert sum(map(len, targets)) == size


def test_the_batch_size_is_found_or_none() -> None:
    assert count_samples(Batch(torch.zeros(3, 2), {"x": torch.zeros(3)})) == 3
    assert count_samples(Batch(None, None)) is None
    with pytest.raises(UsageError, match="hold 2 and 3 samples"):
        count_samples(Batch(torch.zeros(3), torch.zeros(2)))
    with pytest.raises(UsageError, match="a UserDict, which cannot be cut into micro-batches"):
        count_samples(Batch(torch.zeros(3), UserDict(y=torch.zeros(3))))
