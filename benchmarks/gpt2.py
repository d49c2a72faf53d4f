"""GPT-2 as `transformers` builds it from a configuration, with random weights: a model.py for the benchmarks.

gpipe-plan profile benchmarks/gpt2.py --set layers=48 --set width=1600 --set heads=25      1.6 B parameters
gpipe-plan profile benchmarks/gpt2.py --set layers=96 --set width=12288 --set heads=96 --device estimate:h100
"""

import torch
from torch import Tensor, nn

VOCABULARY = 50257


def build_model(layers: int = 12, width: int = 768, heads: int = 12, tokens: int = 128) -> nn.Module:
    """Return GPT-2 without dropout, so that steps can be compared."""
    import transformers  # noqa: PLC0415 - it takes seconds

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=max(1024, tokens),
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def example_batch(batch_size: int, tokens: int = 128) -> tuple[dict[str, Tensor], Tensor]:
    """Return words, which are also the labels: the model returns its own loss."""
    words = torch.randint(0, VOCABULARY, (batch_size, tokens))
    return {"input_ids": words, "labels": words.clone()}, words
