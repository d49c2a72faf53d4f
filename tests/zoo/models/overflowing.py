"""A perceptron whose last layer sometimes overflows in float16 under a loss scale of 2^16."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["build_model", "build_optimizer", "example_batch", "loss_fn"]

WIDTH, POSITIONS = 16, 16


def build_model() -> nn.Sequential:
    last = nn.Linear(WIDTH, 4)
    nn.init.normal_(last.weight, std=0.02)
    return nn.Sequential(_Bounded(), _Bounded(), last)


class _Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(value))


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return noise; one of ten batches has large targets."""
    targets = torch.randn(batch_size, POSITIONS, 4)
    return torch.randn(batch_size, POSITIONS, WIDTH), targets + (20.0 if torch.rand(()) < 0.1 else 0.0)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def build_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer with state and weight decay, which a skipped step must not apply."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
