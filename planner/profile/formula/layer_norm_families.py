"""Derive the shapes of models with layer norms (GPT-2, Phi, StarCoder2, GPT-NeoX, Falcon) from their config.json."""

from dataclasses import replace
from typing import Final

from planner.profile.formula.fields import ConfigReader
from planner.profile.formula.shapes import Attention, Block, FeedForward, Transformer

MOST_LAYERS: Final = 10_000
"""Largest supported number of layers. It limits the memory of `Transformer.blocks`."""


def gpt2_transformer(fields: ConfigReader, sequence: int) -> Transformer:
    """Return the shape of GPT-2, with learned positions, biases and dropout."""
    layers = fields.integer("n_layer", "num_hidden_layers", most=MOST_LAYERS)
    hidden = fields.integer("n_embd", "hidden_size")
    heads = fields.integer("n_head", "num_attention_heads")
    dim = head_dim(fields, hidden, heads)
    attention = Attention(
        heads=heads,
        key_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        qkv_bias=True,
        out_bias=True,
        joined=True,
        rotary=False,
    )
    width = fields.integer("n_inner", default=4 * hidden)
    kept = num_saved_tensors(fields.text("activation_function", "gelu_new"))
    block = Block(attention=attention, feed_forward=FeedForward(width=width, gated=False, bias=True, kept=kept))
    return Transformer(
        hidden=hidden,
        sequence=sequence,
        vocabulary=fields.integer("vocab_size"),
        blocks=(block,) * layers,
        positions=fields.integer("n_positions", "max_position_embeddings"),
        layer_norms=True,
        dropout=fields.number("resid_pdrop") > 0,
        tied=fields.flag("tie_word_embeddings"),
    )


def phi_transformer(fields: ConfigReader, sequence: int) -> Transformer:
    """Return the shape of Phi-1 or Phi-2, with attention and feed-forward layer in parallel."""
    attention = _plain_attention(fields, bias=True, normalized_keys=fields.flag("qk_layernorm"))
    attention = replace(attention, concatenated=True)
    feed_forward = _plain(fields.integer("intermediate_size"), fields.text("hidden_act", "gelu_new"), bias=True)
    block = Block(attention=attention, feed_forward=feed_forward, norms=1)
    return replace(_with_layer_norms(fields, sequence, block, dropout="resid_pdrop"), head_bias=True)


def starcoder2_shape(fields: ConfigReader, sequence: int) -> Transformer:
    """Return the shape of StarCoder2."""
    bias = fields.flag("use_bias")
    attention = _plain_attention(fields, bias=bias)
    feed_forward = _plain(fields.integer("intermediate_size"), fields.text("hidden_act", "gelu"), bias=bias)
    block = Block(attention=attention, feed_forward=feed_forward)
    return _with_layer_norms(fields, sequence, block, dropout="residual_dropout")


def gpt_neox_shape(fields: ConfigReader, sequence: int) -> Transformer:
    """Return the shape of GPT-NeoX or Pythia."""
    attention = _plain_attention(fields, bias=fields.flag("attention_bias"), joined=True, grouped=False)
    feed_forward = _plain(fields.integer("intermediate_size"), fields.text("hidden_act", "gelu"), bias=True)
    block = Block(
        attention=replace(attention, concatenated=True),
        feed_forward=feed_forward,
        parallel=fields.flag("use_parallel_residual"),
    )
    return _with_layer_norms(fields, sequence, block, dropout="hidden_dropout")


def falcon_shape(fields: ConfigReader, sequence: int) -> Transformer:
    """Return the shape of Falcon, in which attention and feed-forward layer may be parallel."""
    hidden, bias = fields.integer("hidden_size"), fields.flag("bias")
    grouped = fields.flag("new_decoder_architecture")
    attention = _plain_attention(fields, bias=bias, joined=True, grouped=False)
    heads = attention.heads
    if grouped:
        heads = fields.integer("num_kv_heads", default=heads)
        fields.check_multiple("num_attention_heads", attention.heads, "num_kv_heads", heads)
    elif fields.flag("multi_query"):
        heads = 1
    width = fields.integer("ffn_hidden_size", default=4 * hidden)
    parallel = fields.flag("parallel_attn")
    block = Block(
        attention=replace(
            attention, key_value_heads=heads, rotary=not fields.flag("alibi"), repeated=grouped, masked=True
        ),
        feed_forward=_plain(width, fields.text("activation", "gelu"), bias=bias),
        norms=fields.integer("num_ln_in_parallel_attn", default=1 + grouped) if parallel else 2,
        parallel=parallel,
    )
    return replace(_with_layer_norms(fields, sequence, block, dropout="hidden_dropout"), uncached_casts=True)


def _plain_attention(
    fields: ConfigReader,
    *,
    bias: bool,
    joined: bool = False,
    normalized_keys: bool = False,
    grouped: bool = True,
) -> Attention:
    heads = fields.integer("num_attention_heads")
    dim = head_dim(fields, fields.integer("hidden_size"), heads)
    return Attention(
        heads=heads,
        key_value_heads=key_value_heads(fields, heads) if grouped else heads,
        key_dim=dim,
        value_dim=dim,
        qkv_bias=bias,
        out_bias=bias,
        normalized_keys=normalized_keys,
        joined=joined,
    )


def _plain(width: int, activation: str, *, bias: bool) -> FeedForward:
    return FeedForward(width=width, gated=False, bias=bias, kept=num_saved_tensors(activation))


def _with_layer_norms(fields: ConfigReader, sequence: int, block: Block, *, dropout: str) -> Transformer:
    return Transformer(
        hidden=fields.integer("hidden_size"),
        sequence=sequence,
        vocabulary=fields.integer("vocab_size"),
        blocks=(block,) * fields.integer("num_hidden_layers", most=MOST_LAYERS),
        layer_norms=True,
        dropout=fields.number(dropout) > 0,
        tied=fields.flag("tie_word_embeddings"),
    )


def head_dim(fields: ConfigReader, hidden: int, heads: int) -> int:
    """Return the width of a head: the key `head_dim`, or without it `hidden` divided by `heads`.

    Args:
        fields: Reader of the configuration.
        hidden: Width of the model.
        heads: Number of attention heads.
    """
    dim = fields.integer("head_dim", default=0)
    if not dim:
        fields.check_multiple("hidden_size", hidden, "num_attention_heads", heads)
    return dim or max(1, hidden // heads)


def key_value_heads(fields: ConfigReader, heads: int) -> int:
    """Return the number of key-value heads, which must divide the number of heads."""
    count = fields.integer("num_key_value_heads", default=heads)
    fields.check_multiple("num_attention_heads", heads, "num_key_value_heads", count)
    return count


def num_saved_tensors(activation: str) -> int:
    """Return the number of tensors that an activation function saves, including its result."""
    # `relu` saves only its result. Transformers computes `gelu_new` by eight operators, which save five tensors.
    return {"relu": 1, "gelu_new": 5}.get(activation, 2)
