"""A small GPT-2 of `transformers` that computes its own loss."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, logging

logging.set_verbosity_error()


def build_model(layers: int = 3, width: int = 16) -> nn.Module:
    """Return the model without dropout, so that runs can be compared."""
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0.0, attn_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def example_batch(batch_size: int) -> tuple[dict[str, Tensor], None]:
    words = torch.randint(32, (batch_size, 8))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}, None
