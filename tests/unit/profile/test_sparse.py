"""Refusal of layers that make sparse gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.core.errors import ModelError
from tests.support.measure import loaded_model, profile_of_model


class Lookup(nn.Module):
    """Reads a table by a function, whose option no attribute of the layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4))

    def forward(self, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, self.table, sparse=True)


@pytest.mark.parametrize(
    "layer", [nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4, mode="sum", sparse=True), Lookup()]
)
def test_layers_with_sparse_gradients_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Linear(4, 4))
    with pytest.raises(ModelError, match='layer "0" makes sparse gradients, which are not supported') as refused:
        profile_of_model(loaded_model(model, lambda batch: torch.randint(10, (batch, 3))), sizes=(2,))
    assert refused.value.hint == "build it with `sparse=False`"
