"""A model with skips, tied weights, a parameter of its own, an in-place activation, a mask and keyword arguments."""

import torch
from torch import Tensor, nn

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    """Attends by the mask, with a bias that the first block computes for all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, value: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = value.mean(-1, keepdim=True) if bias is None else bias
        weights = torch.softmax(value @ value.transpose(1, 2) + mask, -1)
        return value + self.act(self.mix(weights @ self.norm(value))) + bias, bias


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, *, lengths: Tensor) -> Tensor:
        first = value = torch.cat([self.token.expand(len(words), -1, -1), self.words(words)], 1)
        seen = torch.arange(value.shape[1]) <= lengths[:, None]
        mask = torch.where(seen, 0.0, -1e9)[:, None, :]
        bias = None
        for block in self.blocks:
            value, bias = block(value * self.scale, mask, bias)
        return self.head(self.norm(value + first))[:, 1:]


def build_model() -> nn.Module:
    return Branching()


def example_batch(batch_size: int) -> tuple[dict[str, Tensor], Tensor]:
    words = torch.randint(WORDS, (batch_size, 7))
    return {"words": words, "lengths": torch.randint(2, 8, (batch_size,))}, words


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
