"""A small Llama of `transformers` with a tied head that computes its own loss."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()


def build_model(layers: int = 3, width: int = 16) -> nn.Module:
    """Return the model, whose rotary positions every stage computes."""
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=16, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def example_batch(batch_size: int) -> tuple[dict[str, Tensor], None]:
    words = torch.randint(32, (batch_size, 8))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}, None
