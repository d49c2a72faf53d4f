"""Mixtures of experts: losses in attributes, and loops over the experts that were hit."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.own_models.language import CausalSelfAttention, sentences
from tests.zoo.real_model import WORDS, RealModel

__all__ = ["EXPERTS", "AuxLossMoE"]


class Experts(nn.Module):
    """Weights the outputs of all experts by the router, and stores a balance loss in `aux_loss`."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)
        self.aux_loss: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(2, -1)
        load = F.one_hot(chosen, probabilities.shape[-1]).to(x.dtype).sum(-2).mean((0, 1))
        self.aux_loss = len(self.up) * (load * probabilities.mean((0, 1))).sum()
        mask = torch.zeros_like(probabilities).scatter(-1, chosen, weights)
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
        return torch.einsum("bteh,ehd,bte->btd", hidden, self.down, mask)


class ExpertBlock(nn.Module):
    """Attention and experts, with residuals."""

    def __init__(self, width: int, moe: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.moe = CausalSelfAttention(width, 4), moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class AuxLossMoE(nn.Module):
    """Sums `aux_loss` of all layers at the end."""

    def __init__(self, width: int = 32, depth: int = 4, experts: int = 4, vocabulary: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, Experts(width, experts)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for block in self.blocks:
            loss = loss + 0.01 * block.moe.aux_loss
        return {"logits": logits, "loss": loss}


class ReturningBlock(ExpertBlock):
    """Returns the loss of its experts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, self.moe.aux_loss


class ReturnedLossMoE(nn.Module):
    """Passes the sum of losses along the chain."""

    def __init__(self, width: int = 32, depth: int = 4, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(ReturningBlock(width, Experts(width, experts)) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(words)
        balance = torch.zeros(())
        for block in self.blocks:
            x, loss = block(x)
            balance = balance + loss
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * balance}


class Hit(nn.Module):
    """Runs only the experts that were hit, on as many words as the data say."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for n in chosen.unique().tolist():
            rows = torch.nonzero(chosen == n).squeeze(1)
            result = result.index_add(0, rows, self.experts[n](flat[rows]) * weights[rows, None])
        return result.view_as(x)


class RoutedMoE(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4, experts: int = 4, vocabulary: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, Hit(width, experts)) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MultiGate(nn.Module):
    """Tasks that share experts, each with its own gate (MMoE)."""

    def __init__(self, width: int = 16, experts: int = 4, tasks: int = 3) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(10, width), nn.ReLU())
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(tasks)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.bottom(x)
        said = torch.stack([expert(x) for expert in self.experts], 1)
        gates = [gate(x).softmax(-1).unsqueeze(-1) for gate in self.gates]
        return [tower((said * gate).sum(1)) for tower, gate in zip(self.towers, gates, strict=True)]


def _entry(output: Any, _targets: Any = None) -> Tensor:
    return output["loss"]


def _moe(build: Callable[[], nn.Module], **more: Any) -> RealModel:
    return RealModel(family="mixture of experts", build=build, **more)


EXPERTS: dict[str, RealModel] = {
    "MoE, aux_loss in attributes": _moe(AuxLossMoE, inputs=sentences, loss=_entry),
    "MoE, aux_loss handed on": _moe(ReturnedLossMoE, inputs=sentences, loss=_entry),
    "MoE, experts hit by the data": _moe(RoutedMoE, inputs=lambda batch: sentences(batch)[0]),
    "MMoE": _moe(MultiGate, inputs=lambda batch: torch.randn(batch, 10)),
}
