"""Llama as `transformers` builds it, small, its embedding tied to its head; it computes its own loss."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()


def build_model(layers: int = 3, width: int = 16) -> nn.Module:
    """Rotary positions, which every stage computes for itself."""
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=16, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def example_batch(batch_size: int) -> tuple[dict[str, Tensor], None]:
    """The words are their own targets."""
    words = torch.randint(32, (batch_size, 8))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}, None
