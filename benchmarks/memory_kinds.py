"""Models of kinds whose memory is hard to predict, of some megabytes a stage: a model.py with a choice.

gpipe-plan profile benchmarks/memory_kinds.py --set name=lstm
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner.model.nests import tensors_in
from tests.zoo.own_models import experts, generative, language, tables, vision
from tests.zoo.vision import find_torchvision

WORDS, TOKENS, WIDTH, PIXELS, ITEMS = 2048, 32, 128, 64, 20_000

Kind = tuple[Callable[[], nn.Module], Callable[[int], Any]]


def _words(batch: int) -> Tensor:
    return language.sentences(batch, TOKENS, WORDS)[0]


def _sentences(batch: int) -> tuple[Tensor, Tensor]:
    return language.sentences(batch, TOKENS, WORDS)


def _labelled(batch: int) -> dict[str, Tensor]:
    words = _words(batch)
    return {"input_ids": words, "labels": words.clone()}


def _pictures(batch: int) -> Tensor:
    return torch.randn(batch, 3, PIXELS, PIXELS)


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        find_torchvision()
        import timm  # noqa: PLC0415 - it takes seconds

        model: nn.Module = timm.create_model(name, num_classes=7)
        return model.train()

    return build


def _transformers(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers  # noqa: PLC0415 - it takes seconds

        transformers.logging.set_verbosity_error()
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(vocab_size=WORDS, **settings))
        return model.eval()

    return build


_MIXTRAL = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, Kind] = {
    "lstm": (lambda: language.LSTMLanguage(2 * WIDTH, 4, WORDS), _sentences),
    "gru": (lambda: language.GRUTagger(WIDTH, 3, WORDS), _words),
    "gpt2-lora": (lambda: language.lora_gpt2(WIDTH, 6, WORDS, TOKENS), _labelled),
    "densenet121": (_timm("densenet121"), _pictures),
    "efficientnet_b0": (_timm("efficientnet_b0"), _pictures),
    "mixtral": (_transformers("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL), _labelled),
    "moe-aux-loss": (lambda: experts.AuxLossMoE(WIDTH, 4, 4, WORDS), _sentences),
    "moe-routed": (lambda: experts.RoutedMoE(WIDTH, 4, 4, WORDS), _words),
    "fcos": (lambda: vision.FCOS(32), _pictures),
    "detr": (lambda: vision.DETR(WIDTH), _pictures),
    "two-towers": (
        lambda: tables.SharedTowers(WIDTH, ITEMS),
        lambda batch: tables.histories(batch, ITEMS, TOKENS),
    ),
    "siamese": (lambda: vision.Siamese(WIDTH // 2), lambda batch: (_pictures(batch), _pictures(batch))),
    "top-residual": (lambda: language.TopResidual(WIDTH, 4, WORDS), _words),
    "spectral-norm": (
        lambda: generative.Discriminator(nn.utils.parametrizations.spectral_norm, WIDTH // 2),
        _pictures,
    ),
    "tiny-mlp": (tables.tiny_mlp, lambda batch: torch.randn(batch, 8)),
    "mamba": (
        _transformers("MambaForCausalLM", "MambaConfig", hidden_size=WIDTH, num_hidden_layers=4, state_size=8),
        _labelled,
    ),
}
"""By name: the model, and its inputs for so many samples."""


def build_model(name: str = "lstm") -> nn.Module:
    """One of `KINDS`."""
    return KINDS[name][0]()


def example_batch(batch_size: int, name: str = "lstm") -> tuple[Any, Tensor]:
    """Inputs; what the loss needs beside the output is among them."""
    return KINDS[name][1](batch_size), torch.zeros(batch_size)


def loss_fn(output: Any, _target: Tensor) -> Tensor:
    """The model's own, where it has one; else a mean of squares, over all that it returns."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    return torch.stack([tensor.square().mean() for tensor in floats]).sum()
