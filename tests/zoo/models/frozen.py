"""A perceptron with frozen layers, as in fine-tuning."""

import torch
from torch import Tensor, nn

__all__ = ["build_model", "build_optimizer", "example_batch", "loss_fn"]


def build_model(frozen: str = "", width: int = 16) -> nn.Sequential:
    """Return six blocks; `frozen` lists their digits (`012` the first three; `h`: the head)."""
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(6)]
    head = nn.Linear(width, 4)
    for digit in frozen:
        (head if digit == "h" else blocks[int(digit)]).requires_grad_(False)
    # A subclass keeps each block one layer.
    return nn.Sequential(*(_Block(block) for block in blocks), head)


class _Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Tensor) -> Tensor:
        return value + self.block(value)


def example_batch(batch_size: int, width: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, width, width), torch.randint(4, (batch_size, width))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer with two numbers of state per parameter."""
    return torch.optim.AdamW(parameters, lr=1e-2)
