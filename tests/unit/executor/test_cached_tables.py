"""Tensors in attributes: tables that a shared module caches, and running statistics under autocast."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.executor.build.building import build_structure
from planner.executor.equivalence.check import check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8


class Table(nn.Module):
    """A table that the first forward computes, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.cached_length, self.table = 0, None

    def forward(self, value: Tensor) -> Tensor:
        if value.shape[-1] > self.cached_length or self.table.device != value.device:
            self.cached_length = value.shape[-1]
            self.table = torch.arange(self.cached_length).cos()
        return self.table[: value.shape[-1]]


class Layer(nn.Module):
    """Layer that adds a shared table."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), table

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value) + self.table(value))


class Net(nn.Module):
    """Layers that are no Sequential."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


def test_a_table_that_is_cached_with_its_length_may_be_shared_by_layers() -> None:
    def build() -> nn.Module:
        table = Table()
        return Net(*(Layer(table) for _ in range(3)))

    proof = check_equivalence(loaded_model(build, WIDTH), budget_s=30.0).proof
    assert (proof.cuts, proof.uncovered, proof.differs_recomputed) == (2, 0, "")


class Scaled(nn.Module):
    """Layer that divides by a running scale, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), torch.ones(())

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value) / self.scale
        self.scale = 0.9 * self.scale + 0.1 * value.detach().abs().mean()
        return torch.tanh(value)


def test_layers_with_tensors_in_attributes_send_the_dtype_of_autocast() -> None:
    loaded = loaded_model(lambda: Net(*(Scaled() for _ in range(3))), WIDTH)
    loaded = replace(loaded, precision="bf16-mixed")
    outline = build_structure(loaded).outline
    assert outline is not None
    assert [dtype for cut in outline.crossing_shapes for _, dtype in cut] == ["torch.bfloat16"] * 2
