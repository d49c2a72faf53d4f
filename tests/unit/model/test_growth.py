"""Results whose structure depends on the batch size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from tests.support.cutting import Compared, compare


class Tower(nn.Module):
    """Returns its output, also as a list with an item per sample, as vision models of `transformers` do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, value: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            value = torch.tanh(block(value))
        return {"value": value, "images": list(value.split(1))}


class WithTower(nn.Module):
    """Passes the list to the output; `reads` also divides by its length."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.tower = Tower()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.reads = reads

    def forward(self, value: Tensor) -> dict[str, Any]:
        result = self.tower(value)
        value = result["value"]
        for block in self.blocks:
            value = torch.tanh(block(value))
            if self.reads:
                value = value / len(result["images"])
        return {"value": value, "tower": result}


def compare_sizes(model: nn.Module, **options: Any) -> Compared:
    """Compare micro-batches of 3, 1 and 2 samples; the loss does not read the list."""

    def loss_fn(output: dict[str, Any]) -> Tensor:
        return output["value"].square().mean()

    return compare(model, lambda size: torch.randn(size, 5, 8), loss_fn, sizes=(3, 1, 2), **options)


@pytest.mark.parametrize("options", [{"num_stages": 2}, {"num_stages": 5}, {"num_stages": 5, "recompute": True}])
def test_a_list_with_an_item_per_sample_is_not_sent(options: dict[str, Any]) -> None:
    compared = compare_sizes(WithTower(reads=False), **options)
    assert len(compared.chain.layers) == 5
    assert compared.crossing == [1, 1, 1, 1]
    assert compared.loss_error < 1e-6
    assert compared.gradient_error < 1e-5


def test_reading_the_length_of_such_a_list_in_a_later_stage_is_refused() -> None:
    with pytest.raises(ModelError, match=r'"tower.images" has another structure for another batch size') as refused:
        compare_sizes(WithTower(reads=True))
    assert "a tensor whose first dimension counts the samples" in refused.value.hint
