"""Compute FLOP, parameters and bytes of each layer of a transformer, for one sample, on one of the t devices.

The docstring of `planner.profile.formula.costs` has the formulas, their symbols (b, s, h, e, t …) and their sources.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.profile.formula.shapes import Attention, Block, Experts, FeedForward, MatrixProduct, Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    """Parallelism within the layers of a model, and properties of the kernels that run the layers."""

    tensor_parallel: int = 1
    """Number of devices that share each layer (t)."""
    expert_parallel: int = 1
    """Number of device groups among which the experts of each block are divided."""
    capacity: float = 1.0
    """Number of tokens that the experts of a device compute, divided by the number under an even distribution."""
    sequence_parallel: bool = False
    """True if tensors that tensor parallelism does not split are split along the sequence."""
    keep_scores: bool = False
    """True if attention keeps its scores for backward, as it does without a fused kernel."""
    recompute_attention: bool = False
    """True if backward computes attention's scores and products a second time (selective recomputation)."""
    counts_collectives: bool = True
    """True if costs include the all-reduces of tensor parallelism; False if the device's FLOP/s include their time."""
    fused: bool = False
    """True if kernels fuse RMS normalizations, rotations and gated activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of an activation's element, and bytes of a parameter, of its gradient and of its optimizer state."""

    activation: int
    """Bytes of an element of an activation (e)."""
    residual: int = 0
    """Bytes of an element of the hidden state between blocks, for example 4 under autocast; 0 means `activation`."""
    parameter: int
    gradient: int
    optimizer: int
    """Bytes of optimizer state per parameter, including a master copy of the parameter."""
    cast: int = 0
    """Bytes of autocast's copy of a parameter; 0 without autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs of a layer for one sample, on one of the devices that share the layer."""

    name: str
    modules: tuple[str, ...] = ()
    """Paths of the layer's modules; empty if the only module has the path `name`."""
    parameters: int
    largest_weight: int
    """Number of elements of the largest weight."""
    forward_flops: float
    input_flops: float
    weight_flops: float
    output_bytes: float
    saved_bytes: float
    shared_saved_bytes: float = 0.0
    """Bytes saved for backward once per micro-batch, because all samples share them."""
    cast_parameters: int = 0
    """Number of parameters of which autocast caches a copy."""
    weight_held_bytes: float
    transient_bytes: float = 0.0
    """Bytes of temporary tensors in forward; in backward, the gradient of the largest weight is added."""
    collectives: int = 0
    """Number of all-reduces in forward, over the devices that share the layer; backward has as many."""
    collective_bytes: float = 0.0
    """Total bytes of the all-reduces in forward; the backward has as many."""


_TORCHTITAN = {"embedding": "tok_embeddings", "block": "layers.", "mtp": "mtp.layers.", "head": "lm_head"}
"""Names (or prefixes of names) of the modules of torchtitan's decoders, by kind of layer."""


def layer_costs(shape: Transformer, execution: ExecutionSettings, element_bytes: ElementBytes) -> Iterator[LayerCosts]:
    """Yield the costs of embedding, blocks and head, for one sample on one of the devices that share the layer.

    Layers of a decoder from a config.json have torchtitan's names, so that plans can be emitted for torchtitan.

    Args:
        shape: Shape of the model.
        execution: Parallelism within layers, and kernels.
        element_bytes: Bytes per activation and per parameter.
    """
    layers = _LayerFormulas(shape, execution, element_bytes)
    names = {} if shape.family == "transformer" or shape.is_encoder_decoder else _TORCHTITAN
    embedding, head = layers.embedding(), layers.head()
    yield replace(embedding, name=names.get("embedding", "embedding"))
    known: dict[Block, LayerCosts] = {}
    counted: Counter[str] = Counter()
    for block in shape.blocks:
        if block not in known:
            known[block] = layers.block(block)
        yield replace(known[block], name=f"{names.get(block.kind, f'{block.kind}_')}{counted[block.kind]}")
        counted[block.kind] += 1
    yield replace(head, name=names["head"], modules=("norm", names["head"])) if names else head


class _LayerFormulas:
    def __init__(self, shape: Transformer, execution: ExecutionSettings, element_bytes: ElementBytes) -> None:
        self.shape, self.execution, self.element_bytes = shape, execution, element_bytes
        self.e, self.t = element_bytes.activation, execution.tensor_parallel
        self.residual = element_bytes.residual or self.e
        # Elements that each device has of a hidden state (s h), which only sequence parallelism splits.
        self.whole = shape.sequence * shape.hidden / (self.t if execution.sequence_parallel else 1)
        # Encoder and decoder each pass a hidden state from block to block.
        self.streams = 2 if shape.is_encoder_decoder else 1
        # torch's layer norm is one kernel.
        self.eager_norms = not (shape.layer_norms or shape.weightless_norms or execution.fused)
        # A norm in float32 of half-precision states keeps a copy of these.
        self.keeps_copies = (self.eager_norms or shape.weightless_norms) and self.residual < 4
        self.keeps_states = not self.keeps_copies or shape.saves_states_twice
        self.is_autocast = self.residual > self.e
        self.sums = execution.counts_collectives and self.t > 1
        self.normalized = (4 if shape.wide_norms else self.residual) if self.eager_norms else 0

    def embedding(self) -> LayerCosts:
        words = self.shape.vocabulary * self.shape.hidden // self.t
        output = self.residual * self.whole * self.streams
        return LayerCosts(
            name="embedding",
            parameters=words + self.shape.positions * self.shape.hidden,
            largest_weight=words,
            # Looking up rows takes no FLOP.
            forward_flops=0.0,
            input_flops=0.0,
            weight_flops=0.0,
            output_bytes=output,
            # The embedding has one sum in forward, the head one in backward. Each counts as half a sum in both passes.
            collectives=int(self.sums),
            collective_bytes=self._summed_bytes(0.5 * self.streams),
            saved_bytes=(output if self.keeps_states else 0) + (self.whole * self.streams if self.shape.dropout else 0),
            weight_held_bytes=output,
        )

    def block(self, block: Block) -> LayerCosts:
        shape, s, t = self.shape, self.shape.sequence, self.t
        linears = list(block.matrix_products(shape.hidden, t, self.execution.capacity))
        local = [replace(each, copies=max(1, each.copies // self.execution.expert_parallel)) for each in linears]
        products = sum(self._product_flops(each) for each in linears)
        # Products without weights: two in forward, of which the backward makes four, all in I.
        attention = sum(
            2 * each.heads * s * self._span(each) * (each.key_dim + each.value_dim) / t for each in block.attentions
        )
        scores, again = sum(map(self._scores_bytes, block.attentions)), self.execution.recompute_attention
        split = sum(map(self._attention_bytes, block.attentions))
        split += self._feed_forward_bytes(block.feed_forward)
        latent = sum(map(self._latent_bytes, block.attentions))
        masks = block.norms if shape.dropout else 0
        # torch's autocast leaves grouped products in float32.
        cast = sum(each.parameters(t) for each in local if not self.is_autocast or each.copies == 1)
        uncached = shape.uncached_casts and self.is_autocast
        return LayerCosts(
            name=block.kind,
            # Each device has whole normalizations, and whole biases of products whose inputs are split.
            parameters=sum(each.parameters(t) for each in local)
            + block.num_unsplit_parameters(shape.hidden, shape.norm_parameters_per_channel),
            largest_weight=max(map(self._weight, local)) // t,
            forward_flops=products + attention,
            input_flops=products + (3 if again else 2) * attention,
            weight_flops=products,
            output_bytes=self.residual * self.whole * max(self.streams, 2 if block.kind == "mtp" else 1),
            saved_bytes=self.whole * (self._norm_bytes(block, linears) + masks)
            + s * (split / t + latent)
            + (0 if again else scores),
            shared_saved_bytes=self._positions_bytes(block) + (self.element_bytes.cast * cast if uncached else 0),
            cast_parameters=0 if uncached else cast,
            weight_held_bytes=self._held_bytes(linears),
            transient_bytes=scores if again else 0.0,
            # There is one sum per normalized input. The attention and the feed-forward layer of Phi share one.
            collectives=block.num_inputs if self.sums else 0,
            collective_bytes=self._summed_bytes(block.num_inputs),
        )

    def _product_flops(self, linear: MatrixProduct) -> float:
        """Return a product's FLOP on one device, which computes all tokens if neither weights nor tokens are split."""
        is_divided = linear.split != "none" or self.execution.sequence_parallel
        flops = 2 * self.shape.sequence * linear.uses * linear.inputs * sum(linear.outputs)
        return flops / self.t if is_divided else flops

    def head(self) -> LayerCosts:
        shape, e = self.shape, self.e
        words = shape.vocabulary * shape.hidden // self.t
        # Each block that predicts a further token (multi-token prediction) uses the head once more.
        uses = 1 + sum(block.kind == "mtp" for block in shape.blocks)
        logits = uses * shape.sequence * shape.vocabulary / self.t
        flops = 2 * shape.hidden * logits
        normalized = (4 if self.keeps_copies else 0) + self.normalized
        weights = words + (shape.vocabulary if shape.head_bias else 0)
        return LayerCosts(
            name="head",
            parameters=weights + shape.norm_parameters_per_channel * shape.hidden,
            cast_parameters=weights,
            largest_weight=words,
            forward_flops=flops,
            input_flops=flops,
            weight_flops=flops,
            output_bytes=0.0,  # the loss is a single number
            saved_bytes=(e + normalized) * self.whole + (4 + (e if shape.capped else 0)) * logits,
            weight_held_bytes=e * self.whole + e * logits,
            transient_bytes=e * logits,
            collectives=int(self.sums),
            collective_bytes=self._summed_bytes(0.5),
        )

    def _summed_bytes(self, count: float) -> float:
        return count * self.e * self.shape.sequence * self.shape.hidden if self.sums else 0.0

    def _weight(self, linear: MatrixProduct) -> int:
        outputs = sum(linear.outputs) if self.execution.fused else max(linear.outputs)
        return linear.copies * linear.inputs * outputs

    def _span(self, attention: Attention) -> int:
        """Return the number of scores per token, masked or not. Only fused kernels omit scores outside the window."""
        window = attention.window if self.execution.fused else 0
        return min(window or self.shape.sequence, self.shape.sequence)

    def _norm_bytes(self, block: Block, linears: list[MatrixProduct]) -> float:
        """Return the bytes per token and channel that normalizations save for backward, excluding the block's input."""
        router = isinstance(block.feed_forward, Experts) and block.feed_forward.wide_router and self.keeps_copies
        states = 1 if block.parallel else block.norms
        copies = block.norms * ((4 if self.keeps_copies else 0) + self.normalized)
        before = (4 if router else 0) + copies + (states * self.residual if self.keeps_states else 0)
        if not self.is_autocast:
            # States that no normalization reads are kept for the products.
            results = block.num_inputs
        else:
            # Autocast converts the result once for each weight that reads it.
            readers = (each for each in linears if each.split != "inputs" and each.copies == 1)
            results = sum(len(each.outputs) for each in readers if each.inputs == self.shape.hidden)
        return before + self.e * results + block.post_norms * self._inner_norm_bytes()

    def _inner_norm_bytes(self) -> int:
        if not self.eager_norms:
            return self.e
        saved_twice = self.keeps_copies and self.shape.saves_states_twice
        return 4 + (4 if self.shape.wide_norms else self.e) + (self.e if saved_twice else 0)

    def _scores_bytes(self, attention: Attention) -> float:
        elements = attention.heads * self.shape.sequence * self._span(attention) / self.t
        if self.execution.keep_scores:
            # The softmax, the mask of its dropout, and the result of the dropout.
            return elements * (2 * self.e + 1)
        if attention.sinks and not self.execution.fused:
            # The softmax, and under autocast its copy.
            return elements * (self.residual + (self.e if self.is_autocast else 0))
        # The tanh and the softmax, which is in float32, and its copy in half precision.
        if self._is_eager(attention):
            return elements * 8
        return self.e * self.shape.sequence**2 if attention.masked and not self.execution.fused else 0.0

    def _positions_bytes(self, block: Block) -> float:
        if not block.attention.biased:
            return 0.0
        pairs = self.shape.sequence**2
        scores = block.attention.heads * pairs / self.t
        # The sum with the mask; the table, the index of each pair in it, and the zeros.
        made = self.residual * scores + 8 * pairs + (self.e * scores if block.cross_attention else 0)
        return self.e * scores + (made if block.makes_positions else 0)

    def _is_eager(self, attention: Attention) -> bool:
        return (attention.capped or attention.sinks) and not self.execution.fused

    def _attention_bytes(self, attention: Attention) -> float:
        by_head = attention.latent or attention.repeated or self._is_eager(attention)
        groups = attention.heads if by_head else attention.total_key_value_heads(self.t)
        rotated = (attention.heads + groups) * attention.key_dim
        values = groups * attention.value_dim
        if attention.latent is not None:
            # The values are part of a tensor that also holds the part of the keys without rotation.
            values += groups * (attention.key_dim - attention.latent.rotary_dim)
        elif attention.joined and attention.rotary and not (attention.repeated or self.execution.fused):
            # The values are part of a tensor that also holds queries and keys before their rotation.
            values += rotated
        # torch's fused attention gives its result the memory layout of the queries. If these were concatenated, the
        # next product copies the result.
        results = 2 if attention.concatenated and not self.execution.fused else 1
        kept = self.e * (rotated + values + results * attention.heads * attention.value_dim)
        return kept + (rotated * self._inner_norm_bytes() if attention.normalized_keys else 0)

    def _latent_bytes(self, attention: Attention) -> float:
        """Return the bytes per token that latent attention saves for the norms of its latent vectors."""
        if attention.latent is None:
            return 0.0
        ranks = attention.latent.query_rank + attention.latent.key_value_rank
        return (self._inner_norm_bytes() + self.e) * ranks / (self.t if self.execution.sequence_parallel else 1)

    def _feed_forward_bytes(self, layer: FeedForward | Experts) -> float:
        fused = self.execution.fused
        if isinstance(layer, FeedForward):
            # A gate's input and result, the other input, and their product.
            tensors = 2 + layer.gated if fused else layer.kept + 2 * layer.gated
            copied = layer.dropout or (layer.converted and self.is_autocast)
            return layer.width * (self.e * (tensors + copied) + layer.dropout)
        gated = 3 if fused else layer.kept
        # Experts also keep the tokens that they got and their results, which the router's weights multiply. torch's
        # autocast leaves their products in float32.
        uses = layer.top_k * self.execution.capacity
        shared = (3 if fused else 4) * layer.shared_width + (self.shape.hidden if layer.shared_gate else 0)
        return self.residual * uses * (gated * layer.width + 2 * self.shape.hidden) + self.e * shared

    def _held_bytes(self, linears: list[MatrixProduct]) -> float:
        """Return the bytes kept between passes I and W: inputs of products, and gradients of their results."""
        whole = split = 0.0
        for linear in linears:
            ends = {"inputs": linear.inputs * linear.uses, "outputs": sum(linear.outputs) * linear.uses}
            for end, elements in ends.items():
                if linear.split == end:
                    split += elements
                else:
                    whole += elements
        whole /= self.t if self.execution.sequence_parallel else 1
        return self.e * self.shape.sequence * (whole + split / self.t)
