"""Language models: checkpoints, tied and frozen weights, recurrent layers, and adapters."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.real_model import SPECIAL, TOKENS, WORDS, RealModel

__all__ = ["LANGUAGE", "GRUTagger", "LSTMLanguage", "NanoGPT", "TopResidual", "lora_gpt2", "sentences"]


def sentences(batch: int, tokens: int = TOKENS, vocabulary: int = WORDS) -> tuple[Tensor, Tensor]:
    words = torch.randint(2, vocabulary, (batch, tokens + 1))
    return words[:, :-1].clone(), words[:, 1:].clone()


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in self.c_attn(x).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and a perceptron, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT of one file: `forward(idx, targets)` returns logits and the loss, and the head shares the embedding.

    Args:
        width: Of the residual stream.
        depth: Blocks.
        vocabulary: Words.
        tokens: Positions.
        reentrant: Whether its own checkpoints around the blocks are re-entrant; without them, None.
    """

    def __init__(
        self,
        width: int = 32,
        depth: int = 4,
        *,
        vocabulary: int = WORDS,
        tokens: int = TOKENS,
        reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(tokens, width),
                "h": nn.ModuleList(Block(width, 4) for _ in range(depth)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.reentrant = reentrant

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for block in self.transformer["h"]:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class LSTMLanguage(nn.Module):
    """LSTM layers with dropout between them, and a decoder that shares the embedding."""

    def __init__(self, width: int = 24, layers: int = 4, vocabulary: int = WORDS) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnns = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.drop = nn.Dropout(0.1)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.encoder(words)
        for rnn in self.rnns:
            x, _ = rnn(x)
            x = self.drop(x)
        logits = self.decoder(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class GRUTagger(nn.Module):
    """Bidirectional GRUs of two layers each, and a tag for every word."""

    def __init__(self, width: int = 24, stacks: int = 2, vocabulary: int = WORDS, tags: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 2 * width)
        self.stacks = nn.ModuleList(
            nn.GRU(2 * width, width, num_layers=2, bidirectional=True, batch_first=True) for _ in range(stacks)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(2 * width) for _ in range(stacks))
        self.tag = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for gru, norm in zip(self.stacks, self.norms, strict=True):
            x = norm(gru(x)[0])
        return self.tag(x)


class Stateful(nn.Module):
    """A stacked LSTM that passes its last state to a second one: an encoder and a decoder without attention."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target), state)
        return self.out(states)


class Packed(nn.Module):
    """Packs padded sequences, so that sizes depend on the lengths."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.one = nn.LSTM(width, width, batch_first=True)
        self.two = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.one(packed)
        packed, _ = self.two(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=words.shape[1])
        return self.out(states)


class LoRA(nn.Module):
    """A frozen `Conv1D` of transformers with a trained low-rank update."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        inputs, outputs = base.weight.shape
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def lora_gpt2(width: int = 32, depth: int = 4, vocabulary: int = WORDS, tokens: int = 64) -> nn.Module:
    """Return a frozen GPT-2 with LoRA at `c_attn` and `c_proj`."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=depth, n_embd=width, n_head=4, vocab_size=vocabulary, n_positions=tokens, **SPECIAL
    )
    model: Any = transformers.GPT2LMHeadModel(config).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, 4)
        block.attn.c_proj = LoRA(block.attn.c_proj, 4)
    return model.eval()


def _gpt2_with_checkpoints(*, use_reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = transformers.GPT2Config(
            n_layer=4, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=64, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SPECIAL,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config).train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # still the name that everybody uses
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    return build


class TopResidual(nn.Module):
    """Residuals in the model's own forward."""

    def __init__(self, width: int = 32, depth: int = 4, vocabulary: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.attention = nn.ModuleList(CausalSelfAttention(width, 4) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position[:, : words.shape[1]]
        for n, (attention, feed) in enumerate(zip(self.attention, self.feed, strict=True)):
            x = x + attention(self.norms[2 * n](x))
            x = x + feed(self.norms[2 * n + 1](x))
        return self.head(x)


class SelectiveScan(nn.Module):
    """Mamba's scan, step by step."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.project = nn.Linear(width, 2 * state + 1)
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        size = self.A_log.shape[1]
        delta, b, c = self.project(u).split([1, size, size], dim=-1)
        delta, decay = F.softplus(delta), -torch.exp(self.A_log)
        state = x.new_zeros(x.shape[0], x.shape[2], size)
        outputs = []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            state = torch.exp(step * decay) * state + step * b[:, t, None] * u[:, t, :, None]
            outputs.append((state * c[:, t, None]).sum(-1))
        scanned = torch.stack(outputs, 1) + self.D * u
        return x + scanned * F.silu(self.gate(u))


class MambaLike(nn.Module):
    """Scans between an embedding and a head that shares it."""

    def __init__(self, width: int = 32, depth: int = 4, state: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(SelectiveScan(width, state) for _ in range(depth))
        self.norm_f = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x) @ self.embedding.weight.T


class SequenceFirst(nn.Module):
    """Encoder layers of torch in their own order: words first, then samples."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=False) for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words.t())
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x).transpose(0, 1)


def _second(output: Any, _targets: Any = None) -> Tensor:
    """Return the loss, nanoGPT's second output."""
    return output[1]


def _entry(output: Any, _targets: Any = None) -> Tensor:
    """Return the loss of a dictionary."""
    return output["loss"]


def _words(batch: int) -> Tensor:
    return sentences(batch)[0]


def _own_labels(batch: int) -> dict[str, Tensor]:
    words = sentences(batch)[0]
    return {"input_ids": words, "labels": words.clone()}


def _of_lengths(batch: int) -> tuple[Tensor, Tensor]:
    return _words(batch), torch.randint(3, TOKENS, (batch,))


def _gpt(*, reentrant: bool | None = None) -> RealModel:
    return RealModel(
        family="language",
        build=lambda: NanoGPT(reentrant=reentrant),
        inputs=sentences,
        loss=_second,
        no_loss_fn=reentrant is None,
        caveat="returns (logits, loss); no `loss_fn`" if reentrant is None else "",
    )


def _plain(build: Callable[[], nn.Module], *, caveat: str = "") -> RealModel:
    return RealModel(family="language", build=build, inputs=_words, caveat=caveat)


LANGUAGE: dict[str, RealModel] = {
    "nanoGPT": _gpt(),
    "nanoGPT, checkpoints": _gpt(reentrant=False),
    "nanoGPT, re-entrant checkpoints": _gpt(reentrant=True),
    "GPT-2, gradient checkpointing": RealModel(
        family="language", build=_gpt2_with_checkpoints(use_reentrant=False), inputs=_own_labels
    ),
    "GPT-2, re-entrant gradient checkpointing": RealModel(
        family="language", build=_gpt2_with_checkpoints(use_reentrant=True), inputs=_own_labels
    ),
    "GPT-2 with LoRA": RealModel(family="language", build=lora_gpt2, inputs=_own_labels),
    "LSTM language model": RealModel(family="recurrent", build=LSTMLanguage, inputs=sentences, loss=_entry),
    "GRU tagger": RealModel(family="recurrent", build=GRUTagger, inputs=_words),
    "LSTM to LSTM": RealModel(family="recurrent", build=Stateful, inputs=sentences),
    "Packed LSTM": RealModel(family="recurrent", build=Packed, inputs=_of_lengths, refusal="it depends on the data"),
    "Residuals at the top": _plain(TopResidual),
    "Mamba by hand": _plain(MambaLike),
    "Encoder, sequence first": _plain(SequenceFirst),
}
