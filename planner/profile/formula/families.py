"""Derive the shapes of models of Hugging Face transformers from their config.json.

Keys that a file leaves out have the defaults of transformers 5 (`defaults.json`). `tests/unit/profile/test_families.py`
compares defaults and numbers of parameters with those of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from planner.core.errors import UsageError
from planner.profile.formula.fields import ConfigReader
from planner.profile.formula.layer_norm_families import (
    MOST_LAYERS,
    falcon_shape,
    gpt2_transformer,
    gpt_neox_shape,
    head_dim,
    key_value_heads,
    num_saved_tensors,
    phi_transformer,
    starcoder2_shape,
)
from planner.profile.formula.presets import config_defaults
from planner.profile.formula.shapes import Attention, Block, Experts, FeedForward, LatentRanks, Transformer

ShapeFunction = Callable[[ConfigReader, int], Transformer]
"""Function that returns the shape of a model, given its configuration and the number of tokens of a sample."""


def transformer_from_config(
    content: Mapping[str, Any], sequence: int, *, source: str, note: Callable[[str], None] | None = None
) -> Transformer:
    """Return the shape of the model that a config.json describes.

    Args:
        content: Content of config.json.
        sequence: Number of tokens of a sample.
        source: Name of the file, for messages.
        note: Function that is called with a note on sizes for which defaults are used.

    Raises:
        UsageError: The family (`model_type`) is not known, or keys are missing or wrong.
    """
    name = str(content.get("model_type") or "")
    if name not in FAMILIES:
        raise UsageError(
            f"{source}: there is no formula for "
            + (f"`model_type: {name}`" if name else "a file without `model_type`"),
            hint="with torch and transformers installed, `--from-formula never` profiles the model itself; "
            f"formulas exist for {', '.join(FAMILIES)}",
        )
    fields = ConfigReader(content, config_defaults()[name])
    shape = FAMILIES[name](fields, sequence)
    fields.raise_if_invalid(source)
    if fields.assumed and note is not None:
        listed = ", ".join(f"`{key}` {value}" for key, value in fields.assumed.items())
        note(f"{source} leaves out sizes; those of transformers are used: {listed}")
    return replace(shape, family=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Llama:
    """Family of models with the structure of Llama, and the fields of config.json that its members read."""

    qkv_bias: Literal["attention_bias", "qkv_bias"] | bool = False
    """Key in config.json that is true if queries, keys and values have biases; or True or False for all models."""
    out_bias: bool = False
    """True if the key `attention_bias` also applies to the product after attention."""
    mlp_bias: bool = False
    """True if the family reads the key `mlp_bias`, which says whether the feed-forward layer has biases."""
    normalized_keys: bool = False
    whole_key_norms: bool = False
    """True if queries and keys are normalized over all heads together, False if over each head."""
    joined: bool = False
    """True if one product computes queries, keys and values, and one product computes both inputs of the gate."""
    norms: int = 2
    post_norms: int = 0
    wide_norms: bool = False
    weightless_norms: bool = False
    full_every: int = 1
    """Every `full_every`-th block attends to all tokens, all other blocks to a window. 0: all blocks use the window, if
    config.json has one."""
    experts: Literal["mixtral", "qwen2", "qwen3", "gpt_oss"] | None = None
    sinks: bool = False
    """True if each head has a learned score that takes part in the softmax."""

    def __call__(self, fields: ConfigReader, sequence: int) -> Transformer:
        layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
        hidden = fields.integer("hidden_size")
        attention = self._attention(fields, hidden)
        blocks = tuple(
            Block(
                attention=replace(attention, window=window),
                feed_forward=self._feed_forward(fields, n),
                norms=self.norms,
                post_norms=self.post_norms,
                more_parameters=attention.heads if self.sinks else 0,
            )
            for n, window in enumerate(self._windows(fields, layers))
        )
        return Transformer(
            hidden=hidden,
            sequence=sequence,
            vocabulary=fields.integer("vocab_size"),
            blocks=blocks,
            wide_norms=self.wide_norms,
            weightless_norms=self.weightless_norms,
            tied=fields.flag("tie_word_embeddings"),
            capped=fields.number("final_logit_softcapping") > 0,
        )

    def _attention(self, fields: ConfigReader, hidden: int) -> Attention:
        heads = fields.integer("num_attention_heads")
        dim = head_dim(fields, hidden, heads)
        biased = fields.flag("attention_bias")
        return Attention(
            heads=heads,
            key_value_heads=key_value_heads(fields, heads),
            key_dim=dim,
            value_dim=dim,
            qkv_bias=self.qkv_bias if isinstance(self.qkv_bias, bool) else fields.flag(self.qkv_bias),
            out_bias=self.out_bias and biased,
            normalized_keys=self.normalized_keys,
            whole_key_norms=self.whole_key_norms,
            joined=self.joined,
            concatenated=self.joined,
            capped=fields.number("attn_logit_softcapping") > 0,
            sinks=self.sinks,
        )

    def _windows(self, fields: ConfigReader, layers: int) -> list[int]:
        window = fields.integer("sliding_window", default=0, least=0)
        kinds = fields.text_list("layer_types", layers)
        if not fields.flag("use_sliding_window", default=self.full_every != 1):
            return [0] * layers
        if kinds:
            return [window if kind == "sliding_attention" else 0 for kind in kinds]
        every = fields.integer("sliding_window_pattern", default=self.full_every, least=0)
        if every > 1:
            return [0 if (n + 1) % every == 0 else window for n in range(layers)]
        first = fields.integer("max_window_layers", default=0, least=0)
        return [window if n >= first else 0 for n in range(layers)]

    def _feed_forward(self, fields: ConfigReader, n: int) -> FeedForward | Experts:
        if self.experts in ("mixtral", "gpt_oss"):
            return Experts(
                count=fields.integer("num_local_experts", "num_experts"),
                top_k=fields.integer("num_experts_per_tok", "experts_per_token"),
                width=fields.integer("intermediate_size"),
                bias=self.experts == "gpt_oss",
                # Both inputs, the clamped gate, its sigmoid and result, the other input plus 1, and their product.
                kept=7 if self.experts == "gpt_oss" else 4,
            )
        step = fields.integer("decoder_sparse_step", default=1)
        if self.experts and n not in fields.integers("mlp_only_layers") and (n + 1) % step == 0:
            shared = fields.integer("shared_expert_intermediate_size") if self.experts == "qwen2" else 0
            return Experts(
                count=fields.integer("num_experts", "num_local_experts"),
                top_k=fields.integer("num_experts_per_tok"),
                width=fields.integer("moe_intermediate_size"),
                shared_width=shared,
                shared_gate=bool(shared),
            )
        return FeedForward(
            width=fields.integer("intermediate_size"),
            bias=self.mlp_bias and fields.flag("mlp_bias"),
            joined=self.joined,
        )


def _deepseek(fields: ConfigReader, sequence: int) -> Transformer:
    layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    hidden = fields.integer("hidden_size")
    heads, bias = fields.integer("num_attention_heads"), fields.flag("attention_bias")
    rotary = fields.integer("qk_rope_head_dim")
    attention = Attention(
        heads=heads,
        key_value_heads=heads,
        key_dim=fields.integer("qk_nope_head_dim") + rotary,
        value_dim=fields.integer("v_head_dim"),
        qkv_bias=bias,
        out_bias=bias,
        concatenated=True,
        latent=LatentRanks(
            query_rank=fields.integer("q_lora_rank", default=0),
            key_value_rank=fields.integer("kv_lora_rank"),
            rotary_dim=rotary,
        ),
    )
    width = fields.integer("moe_intermediate_size")
    experts = Experts(
        count=fields.integer("n_routed_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        width=width,
        shared_width=width * fields.integer("n_shared_experts", default=0, least=0),
        wide_router=True,
        shared_bias=fields.flag("mlp_bias"),
    )
    dense = FeedForward(width=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias"))
    first = fields.integer("first_k_dense_replace", default=0, least=0)
    return Transformer(
        hidden=hidden,
        sequence=sequence,
        vocabulary=fields.integer("vocab_size"),
        blocks=tuple(Block(attention=attention, feed_forward=dense if n < first else experts) for n in range(layers)),
        tied=fields.flag("tie_word_embeddings"),
    )


def _t5(fields: ConfigReader, sequence: int) -> Transformer:
    layers = fields.integer("num_layers", "num_hidden_layers", most=MOST_LAYERS)
    hidden = fields.integer("d_model", "hidden_size")
    heads, dim = fields.integer("num_heads", "num_attention_heads"), fields.integer("d_kv", "head_dim")
    attention = Attention(heads=heads, key_value_heads=heads, key_dim=dim, value_dim=dim, rotary=False)
    gated, _, name = fields.text("feed_forward_proj", "relu").rpartition("-")
    kept = num_saved_tensors("gelu_new" if (gated, name) == ("gated", "gelu") else name)
    dropout = fields.number("dropout_rate") > 0
    feed_forward = FeedForward(
        width=fields.integer("d_ff", "intermediate_size"),
        gated=bool(gated),
        kept=kept,
        dropout=dropout,
        converted=True,
    )
    own = replace(attention, biased=True)
    encoder = Block(attention=own, feed_forward=feed_forward, kind="encoder")
    decoder = Block(attention=own, cross_attention=attention, feed_forward=feed_forward, norms=3, kind="decoder")
    table = heads * fields.integer("relative_attention_num_buckets")
    encoders = [encoder] * layers
    decoders = [decoder] * fields.integer("num_decoder_layers", default=layers, most=MOST_LAYERS)
    for stack in (encoders, decoders):
        stack[0] = replace(stack[0], more_parameters=table, makes_positions=True)
    encoders[-1] = replace(encoders[-1], post_norms=1)
    return Transformer(
        hidden=hidden,
        sequence=sequence,
        vocabulary=fields.integer("vocab_size"),
        blocks=(*encoders, *decoders),
        saves_states_twice=True,
        dropout=dropout,
        # transformers ties the words of encoder, decoder and head, whatever the file says.
        tied=True,
    )


_BIASED: Final = _Llama(qkv_bias="attention_bias", out_bias=True)

_GEMMA: Final = replace(_BIASED, wide_norms=True)

_LLAMA: Final = replace(_BIASED, mlp_bias=True)

_OLMO: Final = replace(_BIASED, norms=0, post_norms=2, wide_norms=True, normalized_keys=True, whole_key_norms=True)

FAMILIES: Final[Mapping[str, ShapeFunction]] = {
    "gpt2": gpt2_transformer,
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "olmo": replace(_BIASED, weightless_norms=True),
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, full_every=4),
    "mistral": _Llama(full_every=0),
    "qwen2": _Llama(qkv_bias=True),
    "qwen3": replace(_BIASED, normalized_keys=True),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, post_norms=2, full_every=2),
    "gemma3_text": replace(_GEMMA, post_norms=2, normalized_keys=True, full_every=6),
    "phi": phi_transformer,
    "phi3": _Llama(full_every=0, joined=True),
    "starcoder2": starcoder2_shape,
    "gpt_neox": gpt_neox_shape,
    "falcon": falcon_shape,
    "mixtral": _Llama(full_every=0, experts="mixtral"),
    "qwen2_moe": _Llama(qkv_bias="qkv_bias", experts="qwen2"),
    "qwen3_moe": replace(_BIASED, normalized_keys=True, experts="qwen3"),
    "gpt_oss": replace(_GEMMA, full_every=2, experts="gpt_oss", sinks=True),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "t5": _t5,
}
"""Functions that return the shape of a model, by `model_type` in config.json."""
