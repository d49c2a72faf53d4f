"""Parameters by formula, compared with the models that transformers builds from the same configurations."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.formulas import CONFIGURATIONS, SIZES, compared
from planner.api.configuration import configuration_of
from planner.api.options.profiling import ProfileOptions
from planner.core.errors import UsageError
from planner.profile.formula.families import FAMILIES, transformer_from_config
from tests.support.house import ROOT

transformers = pytest.importorskip("transformers")

STACKS = {
    "gpt2": ("transformer.h",),
    "gpt_neox": ("gpt_neox.layers",),
    "falcon": ("transformer.h",),
    "t5": ("encoder.block", "decoder.block"),
}
"""Lists of blocks, where they are not in `model.layers`."""


def random_configuration(name: str, seed: int) -> Any:
    """Return a small configuration with random sizes and choices."""
    draw = random.Random(f"{name} {seed}")
    heads = draw.choice((2, 4))
    hidden = 16 * heads
    known = vars(transformers.AutoConfig.for_model(name))
    common = {
        "num_hidden_layers": draw.randint(2, 5),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, 2, heads)),
        "head_dim": draw.choice((8, 16)),
        "intermediate_size": draw.choice((48, 80)),
        "moe_intermediate_size": draw.choice((24, 40)),
        "shared_expert_intermediate_size": 56,
        "vocab_size": draw.randint(50, 200),
        "num_experts_per_tok": 2,
        "num_experts": draw.choice((4, 6)),
        "num_local_experts": 4,
        "n_routed_experts": 8,
        "n_shared_experts": draw.choice((1, 2)),
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": draw.randint(0, 2),
        "decoder_sparse_step": draw.choice((1, 2)),
        "q_lora_rank": draw.choice((None, 12)),
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        "qkv_bias": draw.random() < 0.5,
        "qk_layernorm": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": 0,
        "use_bias": draw.random() < 0.5,
        "n_layer": draw.randint(1, 4),
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": draw.randint(10, 90),
        "n_inner": draw.choice((None, 100)),
        "num_layers": draw.randint(1, 3),
        "num_decoder_layers": draw.randint(1, 3),
        "d_model": hidden,
        "num_heads": heads,
        "d_kv": 12,
        "d_ff": 72,
        "feed_forward_proj": draw.choice(("relu", "gated-gelu")),
        "new_decoder_architecture": draw.random() < 0.5,
        "multi_query": draw.random() < 0.5,
        "parallel_attn": draw.random() < 0.7,
        "num_kv_heads": draw.choice((None, 2)),
        "ffn_hidden_size": draw.choice((None, 100)),
        "bias": draw.random() < 0.5,
    }
    if name in ("phi", "phi3", "deepseek_v2", "deepseek_v3", "falcon", "olmo"):
        del common["head_dim"]
    if name == "falcon":
        # transformers builds grouped attention with parallel layers only.
        common["parallel_attn"] |= common["new_decoder_architecture"]
    return transformers.AutoConfig.for_model(name, **{key: common[key] for key in common if key in known})


def build_on_meta(configuration: Any) -> torch.nn.Module:
    """Return the model on the meta device."""
    seq2seq = configuration.model_type == "t5"
    kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: torch.nn.Module = kind.from_config(configuration)
    return model


def count(module: torch.nn.Module) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAMILIES)
def test_formula_has_the_models_parameters_in_every_block(name: str, seed: int) -> None:
    """T5's last encoder block also has the encoder's normalization."""
    configuration = random_configuration(name, seed)
    shape = transformer_from_config(configuration.to_dict(), 32, source="config.json")
    model = build_on_meta(configuration)
    assert shape.parameters == count(model), configuration
    blocks = [block for path in STACKS.get(name, ("model.layers",)) for block in model.get_submodule(path)]
    counted = [count(block) for block in blocks]
    if name == "t5":
        counted[configuration.num_layers - 1] += configuration.d_model
    assert [shape.block_parameters(block) for block in shape.blocks] == counted


@pytest.mark.parametrize(
    "path", sorted((ROOT / "sample_models" / "configurations").iterdir()), ids=lambda path: path.name
)
def test_formula_has_the_parameters_of_sample_configurations(path: Path) -> None:
    configuration = transformers.AutoConfig.from_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    assert transformer_from_config(content, 32, source="config.json").parameters == count(build_on_meta(configuration))


@pytest.mark.parametrize("name", ["gemma3", "internvl", "mistral3"])
def test_formula_has_the_parameters_of_nested_language_models(name: str, tmp_path: Path) -> None:
    """The outer configuration decides if the head is tied."""
    whole = transformers.AutoConfig.for_model(name)
    whole.text_config.num_hidden_layers, whole.text_config.vocab_size = 2, 300
    (tmp_path / "config.json").write_text(json.dumps(whole.to_dict()))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(whole)
    read = configuration_of(tmp_path, ProfileOptions())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert transformer_from_config(read.content, 32, source="config.json").parameters == count(
        model.model.language_model
    )


REQUIRED = ("model_type", "num_hidden_layers", "hidden_size", "num_experts_per_tok", "n_layer", "n_embd", "num_layers")
REQUIRED += ("d_model",)
"""Keys without a default in `planner/profile/formula/defaults.json`."""


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(name: str) -> None:
    full = transformers.AutoConfig.for_model(name, num_experts_per_tok=2).to_dict()
    short = {key: full[key] for key in REQUIRED if key in full}
    notes: list[str] = []
    assert transformer_from_config(short, 32, source="config.json", note=notes.append) == transformer_from_config(
        full, 32, source="config.json"
    )
    (note,) = notes
    assert f"`vocab_size` {full['vocab_size']}" in note


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}

ENDLESS = (
    *({"model_type": name, "num_hidden_layers": 4 * 10**9} for name in FAMILIES if name != "gpt2"),
    {"model_type": "gpt2", "n_layer": 4 * 10**9},
    {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 4 * 10**9},
)
"""Configurations whose layers, one entry each, no memory would hold."""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "without `model_type`"),
        ({"model_type": "mamba"}, "`model_type: mamba`"),
        ({"model_type": "llama"}, "`num_hidden_layers` is missing, `hidden_size` is missing"),
        ({"model_type": "t5", "num_layers": -1}, "`num_layers` is -1"),
        ({"model_type": "gpt2", "n_layer": "many"}, "`n_layer` is 'many'"),
        ({**LLAMA, "num_attention_heads": 7}, "`hidden_size` is 64, expected a multiple of `num_attention_heads`"),
        ({**LLAMA, "num_key_value_heads": 3}, "expected a multiple of `num_key_value_heads`, which is 3"),
        *((content, "is 4000000000, expected an integer from 1 to 10000") for content in ENDLESS),
    ],
)
def test_wrong_configurations_are_refused_with_all_reasons(content: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        transformer_from_config(content, 32, source="config.json")
    assert expected in refused.value.message


def test_an_unknown_family_is_refused_with_a_hint():
    """The alternative without formulas needs torch."""
    with pytest.raises(UsageError) as refused:
        transformer_from_config({"model_type": "bert"}, 32, source="config.json")
    assert "with torch and transformers installed, `--from-formula never`" in refused.value.hint


CHECKED = {("mixtral", "bf16-mixed")}
"""Families and precisions that every run of the tests compares."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in CHECKED else pytest.mark.nightly)
        for name in CONFIGURATIONS
        for precision in ("fp32", "bf16", "bf16-mixed")
    ],
)
def test_formula_operations_and_bytes_equal_those_of_the_layers(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimating backend runs the layers. Reasons for differences: `docs/measurements/formulas.md`."""
    sizes = SIZES
    if (name, precision) in CHECKED:  # a first block and another one, for one size, are enough for every run
        sizes = SIZES[:1]
        blocks = dict.fromkeys({"num_hidden_layers"} & CONFIGURATIONS[name].keys(), 2)
        monkeypatch.setitem(CONFIGURATIONS, name, {**CONFIGURATIONS[name], **blocks})
    row = compared(name, precision, tmp_path, sizes)
    assert (row.parameters, row.flops) == pytest.approx((0, 0), abs=0.001)
    assert row.saved == pytest.approx(0, abs=0.03)
