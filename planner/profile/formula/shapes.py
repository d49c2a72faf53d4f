"""Define the shape of a transformer: blocks of attention and a feed-forward layer or experts.

Every block gives a list of matrix products (`MatrixProduct`), from which its parameters, FLOP and bytes follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """Product of each token's vector with one or several weight matrices."""

    inputs: int
    outputs: tuple[int, ...]
    """For each weight matrix, the width of its result."""
    bias: bool = False
    split: Literal["outputs", "inputs", "none"] = "outputs"
    """Dimension of the weights that tensor parallelism splits."""
    copies: int = 1
    """Number of experts, each with its own weights of this size; 1 if there are no experts."""
    uses: float = 1.0
    """Number of experts that each token uses, times `ExecutionSettings.capacity`; 1 if there are no experts."""

    def parameters(self, devices: int = 1) -> int:
        """Return the number of parameters on each of `devices` devices that share the layer."""
        weights = self.copies * self.inputs * sum(self.outputs)
        biases = self.copies * sum(self.outputs) if self.bias else 0
        if self.split == "none":
            return weights + biases
        if self.split == "inputs":
            return weights // devices + biases
        return (weights + biases) // devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRanks:
    """Ranks of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    query_rank: int
    """Rank of queries; 0 if queries are not compressed."""
    key_value_rank: int
    rotary_dim: int
    """Width of the rotated part of each query and key; all heads share the rotated part of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention layer, with grouped queries (arXiv:2305.13245) if there are fewer key-value heads."""

    heads: int
    key_value_heads: int
    key_dim: int
    """Width of a query, and of a key, in one head."""
    value_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    normalized_keys: bool = False
    """True if queries and keys are normalized."""
    whole_key_norms: bool = False
    """True if the norms of queries and keys are over all heads together, False if over each head."""
    joined: bool = False
    """True if a single product computes queries, keys and values."""
    rotary: bool = True
    """True if queries and keys are rotated."""
    capped: bool = False
    """True if a tanh bounds the scores, which torch's fused kernels do not support."""
    repeated: bool = False
    """True if keys and values are copied for each head."""
    masked: bool = False
    """True if a floating-point mask is added to the scores."""
    sinks: bool = False
    """True if each head has a learned score in its softmax, which torch's fused kernels do not support."""
    biased: bool = False
    """True if a learned bias for relative positions is added to the scores."""
    concatenated: bool = False
    """True if queries are concatenated from a rotated part and another part. The product after attention then saves a
    copy of attention's result, unless `ExecutionSettings.fused` is True."""
    window: int = 0
    """Number of tokens to which each token attends; 0 for all tokens."""
    latent: LatentRanks | None = None

    def total_key_value_heads(self, devices: int) -> int:
        """Return the number of key-value heads on all devices together; each device has at least one."""
        return max(self.key_value_heads, devices)

    @property
    def norm_channels(self) -> int:
        """Number of channels of the normalizations in attention."""
        if self.latent is not None:
            return self.latent.query_rank + self.latent.key_value_rank
        heads = self.heads + self.key_value_heads if self.whole_key_norms else 2
        return heads * self.key_dim if self.normalized_keys else 0

    def matrix_products(self, hidden: int, devices: int) -> Iterator[MatrixProduct]:
        """Yield the matrix products with weights, for a model of width `hidden` on `devices` devices."""
        queries = self.heads * self.key_dim
        if self.latent is None:
            keys, values = (self.total_key_value_heads(devices) * width for width in (self.key_dim, self.value_dim))
            outputs = (queries + keys + values,) if self.joined else (queries, keys, values)
            yield MatrixProduct(inputs=hidden, outputs=outputs, bias=self.qkv_bias)
        else:
            rank, rotary = self.latent.query_rank, self.latent.rotary_dim
            compressed = self.latent.key_value_rank + rotary
            yield MatrixProduct(inputs=hidden, outputs=(compressed,), bias=self.qkv_bias, split="none")
            if rank:
                yield MatrixProduct(inputs=hidden, outputs=(rank,), bias=self.qkv_bias, split="none")
            yield MatrixProduct(inputs=rank or hidden, outputs=(queries,))
            expanded = self.heads * (self.key_dim - rotary + self.value_dim)
            yield MatrixProduct(inputs=self.latent.key_value_rank, outputs=(expanded,))
        yield MatrixProduct(inputs=self.heads * self.value_dim, outputs=(hidden,), bias=self.out_bias, split="inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Feed-forward layer. If the field `gated` is True, the layer has a gate (arXiv:2002.05202)."""

    width: int
    gated: bool = True
    bias: bool = False
    joined: bool = False
    """True if a single product computes both inputs of the gate."""
    kept: int = 2
    """Number of tensors that the activation function saves for backward if `ExecutionSettings.fused` is False."""
    dropout: bool = False
    """True if training applies dropout before the last product, which keeps a mask and the result for backward."""
    converted: bool = False
    """True if the input of the last product is converted to float32; autocast then converts it back."""

    def matrix_products(self, hidden: int) -> Iterator[MatrixProduct]:
        """Yield the matrix products with weights, for a model of width `hidden`."""
        outputs = (self.width,) * (2 if self.gated else 1)
        yield MatrixProduct(inputs=hidden, outputs=(sum(outputs),) if self.joined else outputs, bias=self.bias)
        yield MatrixProduct(inputs=self.width, outputs=(hidden,), bias=self.bias, split="inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: gated feed-forward layers, of which each token uses some."""

    count: int
    top_k: int
    """Number of experts that each token uses."""
    width: int
    shared_width: int = 0
    """Width of the shared experts, which all tokens use."""
    wide_router: bool = False
    """True if the router reads hidden states in float32, whatever the precision."""
    bias: bool = False
    """True if router and experts have biases."""
    kept: int = 4
    """Number of tensors that an expert's gated activation saves for backward if `ExecutionSettings.fused` is False."""
    shared_bias: bool = False
    shared_gate: bool = False
    """True if a gate multiplies the result of the shared experts."""

    def matrix_products(self, hidden: int, capacity: float = 1.0) -> Iterator[MatrixProduct]:
        """Yield the products with weights: router, experts, shared experts (`capacity`: see `ExecutionSettings`)."""
        yield MatrixProduct(inputs=hidden, outputs=(self.count,), bias=self.bias, split="none")
        own = MatrixProduct(
            inputs=hidden,
            outputs=(2 * self.width,),
            bias=self.bias,
            copies=self.count,
            uses=self.top_k * capacity,
        )
        yield own
        yield replace(own, inputs=self.width, outputs=(hidden,), split="inputs")
        if self.shared_width:
            yield from FeedForward(width=self.shared_width, bias=self.shared_bias).matrix_products(hidden)
        if self.shared_gate:
            yield MatrixProduct(inputs=hidden, outputs=(1,), split="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Block of a transformer."""

    attention: Attention
    feed_forward: FeedForward | Experts
    cross_attention: Attention | None = None
    """Attention of a decoder to the encoder's result; None in other blocks."""
    norms: int = 2
    """Number of normalizations of the inputs of attention and feed-forward layers; 0 if no input is normalized."""
    post_norms: int = 0
    """Number of normalizations after attention or feed-forward layer. No product with weights reads their results."""
    parallel: bool = False
    """True if all normalizations read the block's input, because attention and feed-forward layer run in parallel."""
    makes_positions: bool = False
    """True if this block computes the table of relative positions, which later blocks use as well."""
    kind: Literal["block", "encoder", "decoder", "mtp"] = "block"
    """Role in the model; `mtp` predicts a further token (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    more_parameters: int = 0
    """Number of other parameters, such as relative positions and attention sinks."""

    @property
    def num_inputs(self) -> int:
        """Number of different tensors that attention and feed-forward layer read as inputs of matrix products."""
        # Each normalization before products creates one of these tensors.
        return self.norms or 2

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention layers of the block: one, or two if it has cross-attention."""
        return (self.attention,) if self.cross_attention is None else (self.attention, self.cross_attention)

    def matrix_products(self, hidden: int, devices: int = 1, capacity: float = 1.0) -> Iterator[MatrixProduct]:
        """Yield the matrix products with weights, in the order of the forward, on one of `devices` devices.

        Args:
            hidden: Width of the model (h).
            devices: Number of devices that share the block.
            capacity: Tokens that the experts of a device compute, divided by the number under an even distribution.
        """
        for attention in self.attentions:
            yield from attention.matrix_products(hidden, devices)
        if isinstance(self.feed_forward, Experts):
            yield from self.feed_forward.matrix_products(hidden, capacity)
        else:
            yield from self.feed_forward.matrix_products(hidden)
        if self.kind == "mtp":
            yield MatrixProduct(inputs=2 * hidden, outputs=(hidden,))

    def num_unsplit_parameters(self, hidden: int, norm_parameters_per_channel: int) -> int:
        """Return the number of parameters that tensor parallelism does not split, without biases of linear layers."""
        # A block that predicts a further token has three more normalizations: of its two inputs and of its result.
        norms = self.norms + self.post_norms + (3 if self.kind == "mtp" else 0)
        channels = norms * hidden + sum(attention.norm_channels for attention in self.attentions)
        return norm_parameters_per_channel * channels + self.more_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Shape of a transformer, which determines its parameters, FLOP and bytes."""

    family: str = "transformer"
    """Name that profiles record as their formula: `model_type` of a config.json, or `transformer`."""
    hidden: int
    """Width of the model (h)."""
    sequence: int
    """Number of tokens of a sample (s)."""
    vocabulary: int
    """Number of words in the vocabulary (V)."""
    blocks: tuple[Block, ...]
    """Blocks between embedding and head, in order."""
    positions: int = 0
    """Number of learned positions; 0 if there are none."""
    layer_norms: bool = False
    """True if normalizations have biases (layer norm); otherwise they only scale (RMS)."""
    wide_norms: bool = False
    """True if a normalized input stays in float32, whatever the precision."""
    saves_states_twice: bool = False
    """True if each RMS normalization saves its input twice: in float32, and in the precision of the hidden states."""
    weightless_norms: bool = False
    """True if normalizations are layer norms without weights, computed in float32."""
    dropout: bool = False
    """True if training applies dropout after embedding, attention and feed-forward layers, with masks for backward."""
    uncached_casts: bool = False
    """True if autocast copies weights of blocks for each micro-batch, because the model transposes them first."""
    tied: bool = False
    """True if the head and the embedding share their weights."""
    head_bias: bool = False
    capped: bool = False
    """True if a tanh limits the logits of the head."""

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return any(block.kind == "decoder" for block in self.blocks)

    @property
    def has_experts(self) -> bool:
        """True if blocks have experts."""
        return any(isinstance(block.feed_forward, Experts) for block in self.blocks)

    @property
    def norm_parameters_per_channel(self) -> int:
        """Number of parameters per channel in a normalization layer."""
        return 0 if self.weightless_norms else 2 if self.layer_norms else 1

    def block_parameters(self, block: Block) -> int:
        """Return the number of parameters of a block."""
        products = sum(linear.parameters() for linear in block.matrix_products(self.hidden))
        return products + block.num_unsplit_parameters(self.hidden, self.norm_parameters_per_channel)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        words = self.vocabulary * self.hidden * (1 if self.tied else 2)
        whole = (self.positions + self.norm_parameters_per_channel) * self.hidden + (
            self.vocabulary if self.head_bias else 0
        )
        return sum(map(self.block_parameters, self.blocks)) + words + whole


def gpt_transformer(
    *, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, feed_forward: int, tied: bool = False
) -> Transformer:
    """Return the shape of a GPT-2 or GPT-3, with learned positions, biases and dropout.

    Args:
        layers: Number of blocks.
        hidden: Width of the model.
        heads: Number of attention heads.
        sequence: Number of tokens of a sample.
        vocabulary: Number of words in the vocabulary.
        feed_forward: Width of the feed-forward layers.
        tied: True if head and embedding share their weights.
    """
    dim = hidden // heads
    attention = Attention(
        heads=heads, key_value_heads=heads, key_dim=dim, value_dim=dim, qkv_bias=True, out_bias=True, rotary=False
    )
    block = Block(attention=attention, feed_forward=FeedForward(width=feed_forward, gated=False, bias=True))
    return Transformer(
        hidden=hidden,
        sequence=sequence,
        vocabulary=vocabulary,
        blocks=(block,) * layers,
        positions=sequence,
        layer_norms=True,
        dropout=True,
        tied=tied,
    )


def with_multi_token_prediction(shape: Transformer, count: int) -> Transformer:
    """Return `shape` with `count` more blocks, for multi-token prediction."""
    return replace(shape, blocks=shape.blocks + (replace(shape.blocks[-1], kind="mtp"),) * count)
