"""Recommendation models (embeddings, towers), and a very small model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.real_model import RealModel

__all__ = ["DLRM", "TABLES", "SharedTowers", "clicks", "histories", "tiny_mlp"]

_FIELDS, _ITEMS, _HISTORY = 4, 50, 6


def clicks(batch: int, items: int = _ITEMS, fields: int = _FIELDS) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 13), torch.randint(0, items, (batch, fields))


def histories(batch: int, items: int = _ITEMS, length: int = _HISTORY) -> tuple[Tensor, Tensor]:
    return torch.randint(0, items, (batch, length)), torch.randint(0, items, (batch, length))


class DLRM(nn.Module):
    """Numbers by a perceptron, categories by embeddings, then all pairs (Naumov et al. 2019)."""

    def __init__(self, width: int = 16, items: int = _ITEMS, fields: int = _FIELDS) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(items, width, mode="sum") for _ in range(fields))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (fields + 1) * fields // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(fields + 1, fields + 1, 1), persistent=False)

    pairs: Tensor

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        vectors = [table(categories[:, n : n + 1]) for n, table in enumerate(self.tables)]
        together = torch.stack([x, *vectors], 1)
        products = torch.bmm(together, together.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logit: Tensor = self.top(torch.cat([x, products], 1))
        return logit.squeeze(1)


class SharedTowers(nn.Module):
    """Users and items by the same encoder, with a loss against the rest of the batch."""

    def __init__(self, width: int = 24, items: int = _ITEMS, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(items, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.user, self.item = nn.Linear(width, width), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def encode(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.encoder:
            x = layer(x)
        return x.mean(1)

    def forward(self, history: Tensor, items: Tensor) -> dict[str, Tensor]:
        users, things = self.user(self.encode(history)), self.item(self.encode(items))
        logits = F.normalize(users, dim=1) @ F.normalize(things, dim=1).t() * self.temperature.exp()
        return {"logits": logits, "loss": F.cross_entropy(logits, torch.arange(len(logits)))}


class DeepFM(nn.Module):
    """Factorized pairs and a deep network on the same embeddings."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Embedding(_FIELDS * _ITEMS, 1)
        self.embed = nn.Embedding(_FIELDS * _ITEMS, width)
        self.deep = nn.Sequential(
            nn.Linear(_FIELDS * width + 13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(),
            nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        rows = categories + torch.arange(_FIELDS) * _ITEMS
        vectors = self.embed(rows)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        logit: Tensor = self.linear(rows).sum(1) + pairs + self.deep(torch.cat([vectors.flatten(1), numbers], 1))
        return logit.squeeze(1)


def tiny_mlp(width: int = 16, depth: int = 4) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), *layers, nn.Linear(width, 2))


def _entry(output: Any, _targets: Any = None) -> Tensor:
    return output["loss"]


TABLES: dict[str, RealModel] = {
    "DLRM": RealModel(family="recommendation", build=DLRM, inputs=clicks),
    "DeepFM": RealModel(family="recommendation", build=DeepFM, inputs=clicks),
    "Two towers, one encoder": RealModel(
        family="recommendation", build=SharedTowers, inputs=histories, loss=_entry,
        caveat="the loss of a batch is not the mean of its samples'",
    ),
    "Tiny perceptron": RealModel(family="small", build=tiny_mlp, inputs=lambda batch: torch.randn(batch, 8)),
}  # fmt: skip
