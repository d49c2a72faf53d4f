"""A chain with everything that is awkward at a boundary.

In-place first layers, views, a pair with an integer tensor and a constant, a dict with a tensor that is passed on
untouched, one that nobody reads and None, tied weights, dropout, a layer without parameters.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embed(nn.Module):
    """Tokens to (hidden, tokens, scale)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, float]:
        """Hidden state of shape (b, 8, 16), the tokens, and a number."""
        return self.table(tokens), tokens, 0.5


class Mix(nn.Module):
    """Uses all three, passes the integers on."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, value: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
        """(b, 8, 16), (b, 8), number."""
        hidden, tokens, scale = value
        mixed = self.dropout(self.linear(hidden)) * scale + tokens.unsqueeze(-1).to(hidden.dtype) * 0.01
        return mixed.transpose(1, 2).contiguous().transpose(1, 2), tokens, scale


class Unpair(nn.Module):
    """Drops the integers."""

    def forward(self, value: tuple[Tensor, Tensor, float]) -> Tensor:
        """The hidden state."""
        return value[0]


class PassOn(nn.Module):
    """Something new, the input itself, something nobody will read, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> dict[str, Tensor | None]:
        """Three tensors of shape (b, 8, 16)."""
        return {"new": torch.tanh(self.linear(hidden)), "same": hidden, "unread": hidden * 2, "nothing": None}


class Join(nn.Module):
    """Adds the first two of three."""

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        """(b, 8, 16)."""
        assert value["nothing"] is None
        return value["new"] + value["same"]


class Head(nn.Module):
    """Logits with the embedding's own table."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.weight = table

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, 8, 32)."""
        return functional.linear(hidden, self.weight)


def build_model(dropout: float = 0.0) -> nn.Module:
    """Eight layers, the first and last tied."""
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
    """Tokens and targets of shape (b, 8)."""
    tokens = torch.randint(32, (batch_size, 8))
    return tokens, torch.roll(tokens, -1, dims=1)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, mean over tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent: its parameters show any wrong gradient."""
    return torch.optim.SGD(parameters, lr=0.1)
