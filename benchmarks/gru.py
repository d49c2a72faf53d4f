"""Sentence classifier of GRU blocks, small enough that a micro-batch takes a few milliseconds."""

import torch
from torch import Tensor, nn

VOCABULARY, CHANNELS, CLASSES, LENGTH = 2000, 96, 10, 32


class GatedBlock(nn.Module):
    """A GRU whose output a gate mixes with its input; shapes (batch, length, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(CHANNELS, CHANNELS, batch_first=True)
        self.gate = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture of the input and the GRU's output, in the shape of the input."""
        new, _ = self.gru(x)
        gate = torch.sigmoid(self.gate(x))
        return gate * new + (1 - gate) * x


class Head(nn.Module):
    """Class scores of the mean over the sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, shape (batch, classes)."""
        return self.linear(x.mean(1))


def build_model() -> nn.Module:
    """Return an embedding, four blocks and the head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, CHANNELS), *(GatedBlock() for _ in range(4)), Head())


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return random words, shape (batch, length), and random classes, shape (batch,)."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (batch_size, LENGTH), generator=generator)
    return words, torch.randint(CLASSES, (batch_size,), generator=generator)


def loss_fn(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(scores, classes)
