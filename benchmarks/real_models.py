"""Models of `transformers` as users bring them, of some width, with random weights: a model.py with a choice.

gpipe-plan profile benchmarks/real_models.py --set name=llama
gpipe-plan profile benchmarks/real_models.py --set name=vit --set frozen=3
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

WORDS, TOKENS, WIDTH, PIXELS = 2048, 64, 256, 64

_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
_WORDS: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0}
_SEQUENCE: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "num_layers": 3,
    "num_heads": 4,
    "d_ff": 4 * WIDTH,
    "d_kv": WIDTH // 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        "language",
        {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 6, "n_head": 4, "n_positions": TOKENS},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", "language", {**_SIZES, **_WORDS, "num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", "language", {**_SIZES, **_WORDS}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", "language", {**_SIZES, **_WORDS, "embedding_size": WIDTH // 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config", "language", _SEQUENCE),
    "vit": ("ViTForImageClassification", "ViTConfig", "vision", {**_SIZES, "image_size": PIXELS, "patch_size": 8}),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        "vision",
        {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2]},
    ),
}
"""By name: class, configuration, kind of input, settings."""


def build_model(name: str = "gpt2", frozen: int = 0) -> nn.Module:
    """Return one of `MODELS` without dropout, so that steps can be compared.

    Args:
        name: Name of the model.
        frozen: Number of first blocks that are not trained, like all layers before them.
    """
    import transformers  # noqa: PLC0415 - it takes seconds

    transformers.logging.set_verbosity_error()
    architecture, config, _, settings = MODELS[name]
    model: nn.Module = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
    for path, parameter in model.named_parameters() if frozen else ():
        number = re.search(r"\.(\d+)\.", path)
        if number is not None and int(number[1]) >= frozen:
            break
        parameter.requires_grad_(False)
    return model.eval()


def example_batch(batch_size: int, name: str = "gpt2") -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs with labels: the models return their own loss."""
    if MODELS[name][2] == "vision":
        labels = torch.randint(0, 2, (batch_size,))
        return {"pixel_values": torch.randn(batch_size, 3, PIXELS, PIXELS), "labels": labels}, labels
    words = torch.randint(1, WORDS, (batch_size, TOKENS))
    return {"input_ids": words, "labels": words.clone()}, words
