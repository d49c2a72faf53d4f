"""Shape of a transformer: blocks that may differ, each with attention, and a feed-forward layer or experts.

Every block is a list of matrix products (`MatrixProduct`), so that parameters, FLOP and bytes follow from one list.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """Matrix product of each token with weights."""

    inputs: int
    outputs: tuple[int, ...]
    """Width of the result of each weight; all weights have the same inputs."""
    bias: bool = False
    split: Literal["outputs", "inputs", "none"] = "outputs"
    """Dimension that tensor parallelism divides."""
    copies: int = 1
    """Number of experts that have such a weight."""
    uses: float = 1.0
    """Number of products per token."""

    def parameters(self, devices: int = 1) -> int:
        """Return the parameters of each of `devices` that share the layer."""
        weights = self.copies * self.inputs * sum(self.outputs)
        biases = self.copies * sum(self.outputs) if self.bias else 0
        if self.split == "none":
            return weights + biases
        if self.split == "inputs":
            return weights // devices + biases
        return (weights + biases) // devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Ranks of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    query_rank: int
    """Rank of queries; 0 if they are not compressed."""
    key_value_rank: int
    rotary_dim: int
    """Part of each query and key that is rotated; all heads share the key's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention, with grouped key-value heads (arXiv:2305.13245) if there are fewer of these."""

    heads: int
    key_value_heads: int
    key_dim: int
    """Width of a query and a key of one head."""
    value_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    normalized_keys: bool = False
    """True if queries and keys are normalized."""
    whole_key_norms: bool = False
    """True if they are normalized over all heads at once; otherwise per head."""
    joined: bool = False
    """True if one weight makes queries, keys and values."""
    rotary: bool = True
    """True if queries and keys are rotated."""
    capped: bool = False
    """True if a tanh bounds the scores, which torch's fused kernels do not support."""
    biased: bool = False
    """True if learned positions are added to the scores; fused kernels keep these sums."""
    concatenated: bool = False
    """True if queries are concatenated from rotated and other parts. The result of torch's fused kernels has the layout
    of the queries, so that the next product copies it."""
    window: int = 0
    """Number of tokens that a token attends to; 0: all."""
    latent: Latent | None = None

    def groups(self, devices: int) -> int:
        """Return the number of key-value heads on all devices together, with copies if devices outnumber heads."""
        return max(self.key_value_heads, devices)

    @property
    def norm_channels(self) -> int:
        """Channels of the normalizations inside."""
        if self.latent is not None:
            return self.latent.query_rank + self.latent.key_value_rank
        heads = self.heads + self.key_value_heads if self.whole_key_norms else 2
        return heads * self.key_dim if self.normalized_keys else 0

    def linears(self, hidden: int, devices: int) -> Iterator[MatrixProduct]:
        """Yield the products with weights."""
        queries = self.heads * self.key_dim
        if self.latent is None:
            keys, values = (self.groups(devices) * width for width in (self.key_dim, self.value_dim))
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
    """Feed-forward layer; gated as in arXiv:2002.05202 if `gated`."""

    width: int
    gated: bool = True
    bias: bool = False
    joined: bool = False
    """True if one weight makes both inputs of the gate."""
    kept: int = 2
    """Tensors that eager kernels of the activation function keep: its input, intermediate results and its result."""

    def linears(self, hidden: int) -> Iterator[MatrixProduct]:
        """Yield the products with weights."""
        outputs = (self.width,) * (2 if self.gated else 1)
        yield MatrixProduct(inputs=hidden, outputs=(sum(outputs),) if self.joined else outputs, bias=self.bias)
        yield MatrixProduct(inputs=self.width, outputs=(hidden,), bias=self.bias, split="inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Gated feed-forward layers of which each token uses some."""

    count: int
    top_k: int
    """Number of experts that each token uses."""
    width: int
    shared_width: int = 0
    """Width of the shared experts, which all tokens use."""
    wide_router: bool = False
    """True if the router reads hidden states in float32, whatever the precision."""
    shared_bias: bool = False
    shared_gate: bool = False
    """True if a gate weighs the shared experts."""

    def linears(self, hidden: int, capacity: float = 1.0) -> Iterator[MatrixProduct]:
        """Yield the products with weights: router, experts, shared experts."""
        yield MatrixProduct(inputs=hidden, outputs=(self.count,), split="none")
        uses = self.top_k * capacity
        yield MatrixProduct(inputs=hidden, outputs=(2 * self.width,), copies=self.count, uses=uses)
        yield MatrixProduct(inputs=self.width, outputs=(hidden,), split="inputs", copies=self.count, uses=uses)
        if self.shared_width:
            yield from FeedForward(width=self.shared_width, bias=self.shared_bias).linears(hidden)
        if self.shared_gate:
            yield MatrixProduct(inputs=hidden, outputs=(1,), split="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Block of a transformer."""

    attention: Attention
    feed_forward: FeedForward | Experts
    cross_attention: Attention | None = None
    """Attention of a decoder to the encoder's result."""
    norms: int = 2
    """Normalizations whose result is multiplied with weights; 0: attention and feed-forward layer read states."""
    post_norms: int = 0
    """Normalizations whose result is only added."""
    kind: Literal["block", "encoder", "decoder", "mtp"] = "block"
    """Role in the model; `mtp` predicts a further token (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    more_parameters: int = 0
    """Other parameters: relative positions, the encoder's last normalization."""

    @property
    def reads(self) -> int:
        """Number of states, normalized or not, that attention and feed-forward layer read."""
        return self.norms or 2

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention layers."""
        return (self.attention,) if self.cross_attention is None else (self.attention, self.cross_attention)

    def linears(self, hidden: int, devices: int = 1, capacity: float = 1.0) -> Iterator[MatrixProduct]:
        """Yield the products with weights.

        Args:
            hidden: Width of the model (h).
            devices: Devices that share the block.
            capacity: Tokens per expert, relative to an even distribution.

        Yields:
            The products, in the order of the forward.
        """
        for attention in self.attentions:
            yield from attention.linears(hidden, devices)
        if isinstance(self.feed_forward, Experts):
            yield from self.feed_forward.linears(hidden, capacity)
        else:
            yield from self.feed_forward.linears(hidden)
        if self.kind == "mtp":
            yield MatrixProduct(inputs=2 * hidden, outputs=(hidden,))

    def whole_parameters(self, hidden: int, norm_width: int) -> int:
        """Return the parameters that tensor parallelism leaves whole on each device, except biases."""
        # A block that predicts a further token normalizes both its inputs and its result.
        norms = self.norms + self.post_norms + (3 if self.kind == "mtp" else 0)
        channels = norms * hidden + sum(attention.norm_channels for attention in self.attentions)
        return norm_width * channels + self.more_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Shape of a transformer."""

    family: str = "transformer"
    """Name of the formula."""
    hidden: int
    """Width (h)."""
    sequence: int
    """Tokens of a sample (s)."""
    vocabulary: int
    """Words (V)."""
    blocks: tuple[Block, ...]
    """Blocks between embedding and head."""
    positions: int = 0
    """Learned positions."""
    layer_norms: bool = False
    """True if normalizations have biases (layer norm); otherwise they only scale (RMS)."""
    wide_norms: bool = False
    """True if a normalized input stays in float32, whatever the precision."""
    dropout: bool = False
    """True if training drops results of the embedding and of each layer, which keeps masks."""
    tied: bool = False
    """True if the head shares the embedding's weights."""
    head_bias: bool = False
    capped: bool = False
    """True if the head bounds its logits by a tanh."""

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return any(block.kind == "decoder" for block in self.blocks)

    @property
    def has_experts(self) -> bool:
        """True if blocks have experts."""
        return any(isinstance(block.feed_forward, Experts) for block in self.blocks)

    @property
    def norm_width(self) -> int:
        """Parameters of a normalization per channel."""
        return 2 if self.layer_norms else 1

    def block_parameters(self, block: Block) -> int:
        """Return the parameters of a block."""
        products = sum(linear.parameters() for linear in block.linears(self.hidden))
        return products + block.whole_parameters(self.hidden, self.norm_width)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        words = self.vocabulary * self.hidden * (1 if self.tied else 2)
        whole = (self.positions + self.norm_width) * self.hidden + (self.vocabulary if self.head_bias else 0)
        return sum(map(self.block_parameters, self.blocks)) + words + whole


def gpt_shape(
    *, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, feed_forward: int, tied: bool = False
) -> Transformer:
    """Return the shape of a decoder with learned positions, biases and dropout, as in GPT-2 and GPT-3."""
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


def with_mtp(shape: Transformer, count: int) -> Transformer:
    """Return the shape with `count` blocks that predict further tokens."""
    return replace(shape, blocks=shape.blocks + (replace(shape.blocks[-1], kind="mtp"),) * count)
