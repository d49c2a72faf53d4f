"""The type of real models, and functions that make those of `transformers` and `timm`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.nests import tensors_in
from tests.zoo.vision import find_torchvision

find_torchvision()

__all__ = [
    "DECODER",
    "GROUPED",
    "SEQ2SEQ",
    "SPECIAL",
    "TOKENS",
    "VISION",
    "WORDS",
    "RealModel",
    "decoder",
    "encoder",
    "experts",
    "from_timm",
    "from_transformers",
    "images",
    "language",
    "loss_of",
    "masked",
    "pixels",
    "seq2seq",
    "series",
    "sound",
    "spectrum",
    "state_space",
    "translation",
    "vision",
    "words",
]

WORDS = 64
TOKENS = 12


def loss_of(output: Any, _targets: Any = None) -> Tensor:
    """Return the model's own loss, or a scalar with every element of the output."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own
    tensors = [t for t in tensors_in(output) if t.is_floating_point()]
    # Not the mean: that of a normalised layer is constant.
    return torch.stack([(t.flatten() * torch.cos(torch.arange(t.numel()))).mean() for t in tensors]).sum()


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """One architecture."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    caveat: str = ""
    loss: Callable[[Any, Any], Tensor] = loss_of
    """Loss of the model's output; labels are among the inputs."""
    no_loss_fn: bool = False
    """Whether its file would have no `loss_fn`: what is taken in its place must be `loss`."""
    refusal: str = ""
    """Words of the message with which the model is refused; empty where it can be cut."""


def from_transformers(
    name: str,
    *,
    inputs: Callable[[int], Any],
    family: str,
    caveat: str = "",
    train: bool = False,
    refusal: str = "",
    **settings: Any,
) -> RealModel:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        kind = getattr(transformers, name)
        model: nn.Module = kind(kind.config_class(**settings))
        return model.train(train)  # dropout would draw other numbers in every run

    return RealModel(family=family, build=build, inputs=inputs, caveat=caveat, refusal=refusal)


def from_timm(name: str, *, size: int, caveat: str = "", train: bool = False, **settings: Any) -> RealModel:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=7, **settings)
        return model.train(train)

    return RealModel(family="timm", build=build, inputs=images(size), caveat=caveat)


def language(batch: int) -> dict[str, Tensor]:
    words = torch.randint(2, WORDS, (batch, TOKENS))
    return {"input_ids": words, "labels": words.clone()}


def masked(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    mask[:, -3:] = 0
    return {**language(batch), "attention_mask": mask}


def words(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    mask[:, -3:] = 0
    return {"input_ids": torch.randint(2, WORDS, (batch, TOKENS)), "attention_mask": mask}


def translation(batch: int) -> dict[str, Tensor]:
    return {**words(batch), "labels": torch.randint(2, WORDS, (batch, TOKENS - 3))}


def images(size: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 3, size, size)


def pixels(size: int) -> Callable[[int], Any]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def sound(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 800)}


def spectrum(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 32), "labels": torch.randint(2, WORDS, (batch, 6))}


def series(batch: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(batch, 32, 2), "future_values": torch.randn(batch, 8, 2)}


DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    **SPECIAL,
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def decoder(name: str, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=masked, family="decoder", **settings)


def encoder(name: str, inputs: Callable[[int], Any] = masked, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=inputs, family="encoder", **settings)


def experts(name: str, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=masked, family="mixture of experts", **settings)


def seq2seq(name: str, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=translation, family="encoder-decoder", **settings)


def state_space(name: str, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=language, family="state space", **settings)


def vision(name: str, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=pixels(32), family="vision", **settings)
