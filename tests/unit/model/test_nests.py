from collections import namedtuple
from dataclasses import make_dataclass
from typing import Any

import torch

from planner.model.nests import ABSENT, align_leaves, common_nest, flatten, tensors_within


def _output(loss: int, other: object, name: str = "Output") -> Any:
    """Return a named tuple, and a dataclass in it, of new classes."""
    state = make_dataclass("State", ["hidden"])(hidden=other)
    return namedtuple(name, "loss state")(loss, state)  # noqa: PYI024 - the class is new in each call


def test_classes_that_each_forward_makes_are_equal() -> None:
    _, nest = flatten(_output(1, 2))
    _, other = flatten(_output(3, 4))
    assert nest == other
    assert hash(nest) == hash(other)
    assert common_nest(nest, other) == nest
    assert align_leaves(_output(3, 4), nest) == [3, 4]


def test_classes_of_other_names_differ() -> None:
    _, nest = flatten(_output(1, 2))
    assert flatten(_output(1, 2, "Other"))[1] != nest
    assert align_leaves(_output(3, 4, "Other"), nest) == [ABSENT, ABSENT]


def test_tensors_in_attributes_of_objects_are_found() -> None:
    mean, scale = torch.zeros(2), torch.ones(2)
    normal = torch.distributions.Independent(torch.distributions.Normal(mean, scale), 1)
    found = {tensor.data_ptr() for tensor in tensors_within({"output": normal})}
    assert {mean.data_ptr(), scale.data_ptr()} <= found
