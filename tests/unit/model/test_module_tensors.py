"""Tensors that modules hold outside their registered parameters and buffers."""

import torch
from torch import Tensor, nn

from planner.model.chain import chain_of
from planner.model.lean import allocate_parameters, build_lean
from planner.model.module_tensors import (
    attribute_tensors,
    move_attribute_tensors,
    replace_tensors,
    replace_tensors_temporarily,
)


class Listed(nn.Module):
    """Reads its parameters from a list, and its buffer from a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
        self.first, self.second = self.weights
        self.register_buffer("scale", torch.ones(4))
        self.tables = {"scale": self.scale, "mask": torch.ones(4)}

    def forward(self, value: Tensor) -> Tensor:
        for weight in self.weights:
            value = value @ weight
        return value * self.tables["scale"] * self.tables["mask"]


class TwoListed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Listed(), Listed()

    def forward(self, value: Tensor) -> Tensor:
        return self.other(self.one(value))


def test_only_unregistered_tensors_are_loose() -> None:
    model = Listed()
    assert [id(tensor) for tensor in attribute_tensors(model)] == [id(model.tables["mask"])]
    assert attribute_tensors(nn.LSTM(4, 4, 2)) == []


def test_replacing_a_parameter_replaces_it_in_lists() -> None:
    model = nn.Sequential(Listed(), nn.LSTM(4, 4))
    replace_tensors(model, lambda t: nn.Parameter(t * 2) if isinstance(t, nn.Parameter) else t * 2)
    listed, recurrent = model
    assert isinstance(listed, Listed)
    assert [id(weight) for weight in listed.weights] == [id(listed.first), id(listed.second)]
    assert listed.tables["scale"] is listed.scale
    assert [id(weight) for weight in recurrent._flat_weights] == [id(p) for p in recurrent.parameters()]


def test_temporary_replacement_restores_lists_and_tensors() -> None:
    model = Listed()
    before, weights = model(torch.ones(2, 4)), model.weights
    with replace_tensors_temporarily(model, lambda t: t.detach() * 0):
        assert not bool(model(torch.ones(2, 4)).any())
    assert torch.equal(model(torch.ones(2, 4)), before)
    assert model.weights is weights


def test_moving_loose_tensors_leaves_parameters_and_buffers() -> None:
    model = Listed()
    weights = model.weights
    move_attribute_tensors(model, lambda tensor: tensor.double())
    assert (model.tables["mask"].dtype, model.tables["scale"].dtype) == (torch.float64, torch.float32)
    assert model.weights is weights


def test_listed_parameters_of_a_lean_model_are_allocated_with_it() -> None:
    model = build_lean(Listed)
    assert isinstance(model, Listed)
    assert all(weight.is_meta for weight in model.weights)
    allocate_parameters([model], model, torch.device("cpu"))
    assert [id(weight) for weight in model.weights] == [id(model.first), id(model.second)]
    assert not model.first.is_meta


def test_a_layer_holds_parameters_that_it_reads_through_a_list() -> None:
    """Otherwise a stage would run on zeros."""
    chain = chain_of(TwoListed(), lambda size: torch.randn(size, 4))
    for name, held in zip(chain.names, chain.outline.model_tensors, strict=True):
        assert held == {f"{name}.{part}" for part in ("first", "second", "scale")}
