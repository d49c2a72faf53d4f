"""A usual model: batch norm, dropout, in-place activations, and masked targets."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["build_model", "build_optimizer", "example_batch", "loss_count", "loss_fn"]

CLASSES, PLACES = 5, 4


class Places(nn.Module):
    """A classifier for each position."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=None)
        self.dropout = nn.Dropout(dropout, inplace=True)
        self.linear = nn.Linear(width, CLASSES * PLACES)

    def forward(self, value: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.dropout(self.norm(value.mean((2, 3)))))
        return logits.view(-1, PLACES, CLASSES)


def build_model(dropout: float = 0.0, norm: str = "train", width: int = 8) -> nn.Sequential:
    """Return nine layers; with `norm` "eval" the batch norms are frozen."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width, momentum=0.3),
        nn.ReLU(inplace=True),
        nn.Dropout2d(dropout),
        nn.Conv2d(width, 2 * width, 3),
        nn.BatchNorm2d(2 * width),
        nn.GELU(),
        nn.Dropout(dropout),
        Places(2 * width, dropout),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and norm == "eval":
            module.eval()
    return model


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return images with a drifting mean, and classes, many of them masked; all of the second and third sample."""
    images = torch.randn(batch_size, 3, 8, 8) + torch.linspace(0, 2, batch_size).view(-1, 1, 1, 1)
    classes = torch.randint(CLASSES, (batch_size, PLACES))
    classes[torch.rand(batch_size, PLACES) < 0.4] = -100
    classes[0, 0] = 0
    classes[2:4] = -100
    return images, classes


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def loss_count(target: Tensor) -> Tensor:
    return (target != -100).sum()


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, so that an earlier step affects a later one."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
