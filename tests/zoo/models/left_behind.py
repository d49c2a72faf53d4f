"""A model with losses in attributes, reentrant checkpoints, and its own loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 50, 16


class Experts(nn.Module):
    """Stores a loss of its routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)
        self.aux_loss: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        share = torch.softmax(self.router(value), -1)
        self.aux_loss = share.square().sum(-1).mean()
        return value + torch.tanh(self.expert(value)) * share[..., :1]


class Block(nn.Module):
    """Checkpoints itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.linear(self.norm(value)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(module for _ in range(3) for module in (Experts(), Block()))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        value: Any = self.embedding(words)
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=True) if isinstance(block, Block) else block(value)
        logits = self.head(value)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss + sum(block.aux_loss for block in self.blocks if isinstance(block, Experts))


def build_model() -> nn.Module:
    return Model()


def example_batch(batch_size: int) -> tuple[Any, None]:
    """Return words; the model computes its own loss."""
    words = torch.randint(WORDS, (batch_size, 7))
    return (words[:, :-1], words[:, 1:]), None
