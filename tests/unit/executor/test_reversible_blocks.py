"""Blocks within an autograd function that calls modules, as in reversible networks."""

from typing import Any

import torch
from torch import Tensor, nn

from planner.executor.equivalence.check import check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8


class RunsBlocks(torch.autograd.Function):
    """Runs blocks without a graph, and again in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.blocks, ctx.value = blocks, value.detach()
        for block in blocks:
            value = block(value)
        return value * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            start = ctx.value.requires_grad_()
            value = start
            for block in ctx.blocks:
                value = block(value)
            value.backward(gradients[0])
        return start.grad, None


class Net(nn.Module):
    """Two groups of such blocks, with a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))
        self.start, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = self.middle(RunsBlocks.apply(self.start(value), self.first))
        return RunsBlocks.apply(value, self.second)


def test_a_model_is_cut_between_autograd_functions_that_call_modules() -> None:
    found = check_equivalence(loaded_model(Net, WIDTH), budget_s=30.0)
    assert (found.proof.cuts, found.proof.uncovered, found.warnings) == (2, 0, ())
