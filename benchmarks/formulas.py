"""FLOP and bytes by formula, compared with the layers that the estimating backend runs on tensors without values.

    python -m benchmarks.formulas [family …]

One row per family and precision: parameters, forward FLOP, and bytes saved for backward, of all layers together. Each
is the largest difference at two sizes: one sample, and two samples of twice the length.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import planner
from planner.core.errors import PlannerError
from planner.core.values.profile import Profile

PRECISIONS = ("fp32", "bf16", "bf16-mixed")
SIZES = ((1, 384), (2, 768))
"""Numbers of samples, and their lengths."""

_LONGEST = max(sequence for _, sequence in SIZES)
_DECODER = {
    "architectures": ["ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "vocab_size": 1000,
    "max_position_embeddings": _LONGEST,
    "pad_token_id": 0,
}
_DENSE = {**_DECODER, "head_dim": 64}
_ROUTED = {
    **_DENSE,
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 192,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,  # as wide as a key: otherwise torch has no fused kernel on a CPU
    "n_group": 4,
    "topk_group": 2,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 3,
        "n_embd": 512,
        "n_head": 8,
        "vocab_size": 1000,
        "n_positions": _LONGEST,
    },
    "llama": _DENSE,
    "granite": _DENSE,
    "smollm3": _DENSE,
    "olmo2": _DECODER,
    "olmo3": _DECODER,
    "mistral": _DENSE,
    "qwen2": _DECODER,
    "qwen3": _DENSE,
    "gemma": _DENSE,
    "gemma2": _DENSE,
    "gemma3_text": _DENSE,
    "olmo": _DECODER,
    "falcon": {**_DECODER, "new_decoder_architecture": True, "num_kv_heads": 2},
    "phi": _DECODER,
    "phi3": _DECODER,
    "starcoder2": _DECODER,
    "gpt_neox": _DECODER,
    "mixtral": {**_ROUTED, "intermediate_size": 384},
    "qwen2_moe": {**_ROUTED, "shared_expert_intermediate_size": 384},
    "qwen3_moe": _ROUTED,
    "gpt_oss": {**_ROUTED, "intermediate_size": 384, "sliding_window": 128},
    "deepseek_v2": {key: value for key, value in _LATENT.items() if key != "head_dim"},
    "deepseek_v3": {key: value for key, value in _LATENT.items() if key != "head_dim"},
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": 3,
        "d_model": 512,
        "num_heads": 8,
        "d_kv": 64,
        "d_ff": 1408,
        "vocab_size": 1000,
        "decoder_start_token_id": 0,
        "n_positions": _LONGEST,
    },
}
"""Small models, one of each family."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Largest relative differences of the formula from the layers over all sizes."""

    family: str
    precision: str
    parameters: float
    flops: float
    saved: float


def profiles(family: str, precision: str, folder: Path, *, samples: int, sequence: int) -> tuple[Profile, Profile]:
    """Return the profile by formula, and that of the layers."""
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGURATIONS[family], "model_type": family}))
    asked = {"device": "estimate:h100", "dtype": precision, "sequence": sequence, "batch_sizes": samples}
    return planner.profile(path, **asked), planner.profile(path, from_formula="never", proof_budget="0s", **asked)


def rows(families: list[str]) -> Iterator[Row]:
    """Compare all families in all precisions."""
    for family in families:
        for precision in PRECISIONS:
            with TemporaryDirectory() as folder:
                yield compared(family, precision, Path(folder))


def compared(family: str, precision: str, folder: Path, sizes: Sequence[tuple[int, int]] = SIZES) -> Row:
    """Compare one family in one precision."""
    pairs = [profiles(family, precision, folder, samples=samples, sequence=sequence) for samples, sequence in sizes]

    def largest(read: Callable[[Profile], float]) -> float:
        return max((read(formula) / read(layers) - 1 for formula, layers in pairs), key=abs)

    return Row(
        family=family,
        precision=precision,
        parameters=largest(lambda profile: profile.model.parameters),
        flops=largest(lambda profile: sum(layer.forward_flops[0] for layer in profile.layers)),
        saved=largest(lambda profile: sum(layer.saved_bytes[0] for layer in profile.layers)),
    )


def main() -> None:
    """Print the table of `docs/measurements/formulas.md`."""
    print("| family | precision | parameters | forward FLOP | saved |\n|---|---|---|---|---|")
    for family in sys.argv[1:] or list(CONFIGURATIONS):
        try:
            for row in rows([family]):
                shown = (f"{100 * value:+.2f} %" for value in (row.parameters, row.flops, row.saved))
                print(f"| {row.family} | {row.precision} | {' | '.join(shown)} |", flush=True)
        except PlannerError as error:
            print(f"| {family} | | {error.message} | | |", flush=True)


if __name__ == "__main__":
    main()
