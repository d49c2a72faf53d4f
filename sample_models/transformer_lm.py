"""Transformer-L, the language model of the GPipe paper (Huang et al. 2019, table 1), small by default.

A decoder-only Transformer (Vaswani et al. 2017) with pre-norm blocks and an untied output projection. For the paper's
sizes (width 2048, feed-forward 8192, 32 heads, vocabulary 32,000, 1024 tokens) it has the parameters the paper counts:

    embedding  V*d              positions are sinusoids and hold no parameters
    block      12*d*d + 13*d    q, k, v, o: 4*d*d + 4*d; feed-forward: 8*d*d + 5*d; two norms: 4*d
    head       V*d + V + 2*d    projection with bias, final norm
    total      131,108,096 + 50,358,272*L

Shapes: b samples, t tokens, d width, V vocabulary.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoids(tokens: int, width: int) -> Tensor:
    """Positions of Vaswani et al., section 3.5: sine in the even columns, cosine in the odd ones; (t, d)."""
    position = torch.arange(tokens, dtype=torch.float32).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    angle = position * frequency
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)


class Embedding(nn.Module):
    """Token embedding plus position: (b, t) int64 -> (b, t, d)."""

    position: Tensor

    def __init__(self, vocabulary: int, width: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("position", sinusoids(tokens, width))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return embedded


class CausalAttention(nn.Module):
    """Multi-head attention of each token to itself and the ones before it: (b, t, d) -> (b, t, d)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        # (b, t, 3*d) -> (b, t, 3, heads, d/heads) -> three of (b, heads, t, d/heads)
        split: Tensor = self.query_key_value(hidden).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return attended


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and beside a residual: (b, t, d) -> (b, t, d)."""

    def __init__(self, width: int, feed_forward: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, feed_forward), nn.ReLU(), nn.Linear(feed_forward, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        mapped: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden + mapped


class Head(nn.Module):
    """Final norm and output projection: (b, t, d) -> logits (b, t, V)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(hidden))
        return logits


def build_model(
    *,
    layers: int = 8,
    width: int = 256,
    feed_forward: int = 1024,
    heads: int = 8,
    vocabulary: int = 4096,
    tokens: int = 128,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build Transformer-L as a chain of L + 2 layers: embedding, L blocks, head.

    Args:
        layers: L, the number of blocks.
        width: d, of the hidden states; even, and divisible by `heads`.
        feed_forward: Width inside the feed-forward part.
        heads: Attention heads per block.
        vocabulary: V, the number of different tokens.
        tokens: t, the longest sequence.
        dropout: Probability, on embeddings, attention weights and residual branches.

    Raises:
        ValueError: If `width` is odd or not divisible by `heads`.

    """
    if width % 2 or width % heads:
        message = f"width {width} must be even and divisible by heads {heads}"
        raise ValueError(message)
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["embedding"] = Embedding(vocabulary, width, tokens, dropout)
    for index in range(layers):
        chain[f"block_{index}"] = Block(width, feed_forward, heads, dropout)
    chain["head"] = Head(width, vocabulary)
    return nn.Sequential(chain)


def example_batch(batch_size: int, *, tokens: int = 128, vocabulary: int = 4096) -> tuple[Tensor, Tensor]:
    """Draw counting sequences: from a random token on, in steps of 1 or 2, modulo the vocabulary.

    Returns:
        The tokens and the token after each of them, both (b, t) int64.

    """
    start = torch.randint(vocabulary, (batch_size, 1))
    # Two step sizes: a token alone leaves its successor open, so attention has something to learn.
    step = torch.randint(1, 3, (batch_size, 1))
    sequence = (start + step * torch.arange(tokens + 1)) % vocabulary
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the logits (b, t, V) with the next tokens (b, t), mean over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at 3e-4, the usual choice for models of this kind."""
    return torch.optim.AdamW(parameters, lr=3e-4)
