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
from tests.zoo.models import memory_kinds as small
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


class Penalized(small.Residual):
    """Also returns the sum of all absolute weights, so that the last stage reads parameters of all others."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(words), 1e-6 * torch.stack([p.abs().sum() for p in self.parameters()]).sum()


class SharedTowers(nn.Module):
    """A detector with towers of four convolutions for classes and for boxes, which all levels of a pyramid share."""

    def __init__(self, width: int = WIDTH // 2, levels: int = 3) -> None:
        super().__init__()
        widths = [width << n for n in range(levels)]
        self.stem = vision.conv(3, width, 2)
        self.body = nn.ModuleList(vision.conv(widths[max(0, n - 1)], widths[n], 2) for n in range(levels))
        self.pyramid = vision.FeaturePyramid(widths, width)
        self.classes, self.boxes = (
            nn.Sequential(*(vision.conv(width, width) for _ in range(4)), nn.Conv2d(width, outputs, 3, 1, 1))
            for outputs in (9, 4)
        )

    def forward(self, pictures: Tensor) -> list[Tensor]:
        value = self.stem(pictures)
        levels = []
        for layer in self.body:
            value = layer(value)
            levels.append(value)
        return [tower(level) for level in self.pyramid(levels) for tower in (self.classes, self.boxes)]


def _paligemma() -> nn.Module:
    import transformers  # noqa: PLC0415 - it takes seconds

    text = transformers.GemmaConfig(**_DECODER, num_key_value_heads=2, head_dim=WIDTH // 4, vocab_size=WORDS)
    seen = transformers.SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=4,
        image_size=PIXELS, patch_size=16,
    )  # fmt: skip
    config = transformers.PaliGemmaConfig(
        text_config=text.to_dict(), vision_config=seen.to_dict(), image_token_index=_PICTURE, projection_dim=WIDTH
    )
    return transformers.PaliGemmaForConditionalGeneration(config).eval()


def _pictures_and_words(batch: int) -> dict[str, Tensor]:
    words = torch.randint(2, _PICTURE, (batch, TOKENS))
    words[:, :16] = _PICTURE  # one for each patch
    return {"input_ids": words, "pixel_values": _pictures(batch), "labels": words.clone(),
            "token_type_ids": torch.zeros_like(words), "attention_mask": torch.ones_like(words)}  # fmt: skip


_PICTURE = WORDS - 1
_DECODER = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
_SEQUENCES = {
    "d_model": WIDTH,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 2),
    # With more experts, transformers 5.23 sends no token to any but the first two, and only the prediction counts all.
    "num_experts": 2,
    "expert_capacity": 64,
}
_ZAMBA2 = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "hybrid"] * 3,
    "num_attention_heads": 4,
    "mamba_d_state": 16,
    "n_mamba_heads": 4,
    "use_mamba_kernels": False,
    "num_mem_blocks": 1,
    "chunk_size": 16,
}
_VITS = {
    "hidden_size": WIDTH,
    "flow_size": WIDTH,
    "spectrogram_bins": WIDTH + 1,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 2 * WIDTH,
    "upsample_initial_channel": WIDTH,
    "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8],
    "prior_encoder_num_flows": 2,
    "prior_encoder_num_wavenet_layers": 2,
    "duration_predictor_num_flows": 2,
    # So fast that every word lasts one frame. Otherwise, lengths depend on weights and random numbers, and stages
    # refuse tensors whose shapes differ from those of `example_batch`.
    "speaking_rate": 1e4,
}
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
    "pruned": (small.Pruned, lambda batch: small.example_batch(batch, "pruned")[0]),
    "repeated": (small.Repeated, lambda batch: small.example_batch(batch, "repeated")[0]),
    "penalty": (Penalized, lambda batch: small.example_batch(batch, "residual")[0]),
    "nllb-moe": (
        _transformers("NllbMoeForConditionalGeneration", "NllbMoeConfig", **_SEQUENCES),
        _labelled,
    ),
    "jetmoe": (
        _transformers("JetMoeForCausalLM", "JetMoeConfig", **_DECODER, num_key_value_heads=4, kv_channels=WIDTH // 4),
        _labelled,
    ),
    "detector": (SharedTowers, _pictures),
    "canine": (
        _transformers("CanineForSequenceClassification", "CanineConfig", **_DECODER, local_transformer_stride=16),
        lambda batch: {"input_ids": _words(batch), "labels": torch.zeros(batch, dtype=torch.int64)},
    ),
    "zamba2": (_transformers("Zamba2ForCausalLM", "Zamba2Config", **_ZAMBA2), _labelled),
    "paligemma": (_paligemma, _pictures_and_words),
    "vq-vae": (lambda: generative.VQVAE(WIDTH // 2, 64), _pictures),
    "vits": (_transformers("VitsModel", "VitsConfig", **_VITS), lambda batch: {"input_ids": _words(batch)}),
}
"""By name: the model, and its inputs for so many samples."""


def build_model(name: str = "lstm") -> nn.Module:
    """Return one of `KINDS`."""
    return KINDS[name][0]()


def example_batch(batch_size: int, name: str = "lstm") -> tuple[Any, Tensor]:
    """Return inputs, which include what the loss needs besides the output."""
    return KINDS[name][1](batch_size), torch.zeros(batch_size)


def loss_fn(output: Any, _target: Tensor) -> Tensor:
    """Return the model's own loss if it has one, else a mean of squares over all outputs."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    return torch.stack([tensor.square().mean() for tensor in floats]).sum()
