"""A chain with unusual boundaries: integers, numbers, unread and repeated tensors, None."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embed(nn.Module):
    """Returns a hidden state, the tokens, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, float]:
        return self.table(tokens), tokens, 0.5


class Mix(nn.Module):
    """Reads all three, and returns the tokens unchanged."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, value: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
        hidden, tokens, scale = value
        mixed = self.dropout(self.linear(hidden)) * scale + tokens.unsqueeze(-1).to(hidden.dtype) * 0.01
        return mixed.transpose(1, 2).contiguous().transpose(1, 2), tokens, scale


class Unpair(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor, float]) -> Tensor:
        return value[0]


class PassOn(nn.Module):
    """Returns a new tensor, its input, an unread tensor, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> dict[str, Tensor | None]:
        return {"new": torch.tanh(self.linear(hidden)), "same": hidden, "unread": hidden * 2, "nothing": None}


class Join(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        assert value["nothing"] is None
        return value["new"] + value["same"]


class Head(nn.Module):
    """Computes logits with the embedding's table."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.weight = table

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)


def build_model(dropout: float = 0.0) -> nn.Module:
    embed = Embed()
    return nn.Sequential(
        embed,
        Mix(dropout),
        Unpair(),
        nn.ReLU(inplace=True),
        nn.Sequential(PassOn(), Join()),
        nn.ReLU(inplace=True),
        Head(embed.table.weight),
    )


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (batch_size, 8))
    return tokens, torch.roll(tokens, -1, dims=1)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without momentum, which shows any wrong gradient."""
    return torch.optim.SGD(parameters, lr=0.1)
