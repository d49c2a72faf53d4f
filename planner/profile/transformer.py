"""Compute the profile of a transformer by published formulas, to plan before there is code or a device.

    s   tokens of a sample           h   width                   V   words
    b   samples of a micro-batch     f   width of the            t   devices that share each layer
    a   heads                            feed-forward layers     e   bytes of an activation

FLOP of one micro-batch, on all t devices together (Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", arXiv:2104.04473; split backward as in Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241, table 1; both have f = 4h):

                  F                           I                           W
    block         8bsh^2 + 4bshf + 4bs^2h     8bsh^2 + 4bshf + 8bs^2h     8bsh^2 + 4bshf
    head          2bshV                       2bshV                       2bshV

Bytes that each device keeps of one micro-batch for its backward (Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", arXiv:2205.05198, equations 1 to 4, where f = 4h and e = 2). Each of the t devices has its
part of split tensors, and all of whole tensors, unless sequence parallelism splits these as well:

                  whole                split
    embedding     bsh (e + 1)          -
    block         bsh (4e + 2)         e (4bsh + 2bsf) / t, and with kept scores abs^2 (2e + 1) / t
    head          bsh e                4bsV / t: logits in float32

From I to W a block keeps the inputs of its products and the gradients of their results: 4bsh e whole, and split e (4bsh
+ 2bsf) / t, which is 32bsh in the papers' case. The formulas include no transients of a layer. This module adds the
gradient of a layer's largest weight, which exists before it is added to that of earlier micro-batches, and a second
copy of the head's logits.

Not counted: transfers between the t devices, operators that are bound by memory rather than by FLOP, workspaces of
kernels. A measured rate of a device includes the effect of the first two.
"""

from dataclasses import asdict, dataclass
from hashlib import sha256

from planner.core.values.profile import GENERATOR, Device, Environment, LayerProfile, Model, Profile, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Shape of a decoder with learned positions and biases, as in GPT-2 and GPT-3."""

    layers: int
    """Blocks between embedding and head."""
    hidden: int
    """Width (h)."""
    heads: int
    sequence: int
    """Tokens of a sample (s)."""
    vocabulary: int
    """Words (V)."""
    feed_forward: int
    """Width of the feed-forward layers (f)."""
    tensor_parallel: int = 1
    """Devices that share each layer (t)."""
    sequence_parallel: bool = False
    """True if tensors that tensor parallelism leaves whole are split along the sequence."""
    keep_scores: bool = False
    """True if attention keeps its scores for backward, as without a fused kernel."""
    tied: bool = False
    """True if the head shares the embedding's weights."""

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, on all t devices together: 12h^2 + 13h if f = 4h."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.feed_forward + 9 * self.hidden + self.feed_forward

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        words = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.block_parameters + words + (self.sequence + 2) * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of one activation, and bytes per parameter."""

    activation: int
    """Bytes of an activation (e)."""
    parameter: int
    gradient: int
    optimizer: int
    """Bytes of the optimizer's state; master copies of parameters are part of it."""
    cast: int = 0
    """Bytes of autocast's copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Rates of a device."""

    flops_per_s: float
    bytes_per_s: float = 0.0
    """Bandwidth between its memory and its cores, which bounds the optimizer's step; 0 if unknown: then the step takes
    no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Layer on one of the t devices, for one sample; times and memory of a micro-batch are b times as large."""

    name: str
    parameters: int
    largest_weight: int
    """Number of parameters in the largest weight."""
    forward_flops: float
    input_flops: float
    weight_flops: float
    output_bytes: float
    saved_bytes: float
    weight_held_bytes: float
    transient_bytes: float = 0.0
    """Transient bytes in forward, and in backward in addition to the gradient of the largest weight."""


def transformer_profile(
    shape: Transformer,
    widths: Widths,
    pace: Pace,
    *,
    device: Device,
    dtype: str,
    optimizer: str,
    micro_batch_sizes: tuple[int, ...],
    steps_at_once: bool,
) -> Profile:
    """Return the profile of a transformer: embedding, blocks, head with the loss.

    Args:
        shape: The model.
        widths: Bytes of its numbers.
        pace: Rates of the device.
        device: The device, as named in the profile.
        dtype: The precision, as named in the profile.
        optimizer: Name of the optimizer.
        micro_batch_sizes: Sizes, in samples.
        steps_at_once: Whether the optimizer steps all parameters at once, with a copy of them as transient.

    Returns:
        A profile with `how: estimated` in its device, including split backwards.
    """
    blocks = [_block(shape, widths, f"block_{n}") for n in range(shape.layers)]
    layers = [
        _costs(layer, shape, widths, pace, sizes=micro_batch_sizes, steps_at_once=steps_at_once)
        for layer in (_embedding(shape, widths), *blocks, _head(shape, widths))
    ]
    return Profile(
        generator=GENERATOR,
        model=Model(settings=_settings(shape, pace), parameters=shape.parameters),
        device=device,
        environment=Environment(dtype=dtype),
        optimizer=optimizer,
        optimizer_peak="sum" if steps_at_once else "largest",
        micro_batch_sizes=micro_batch_sizes,
        layers=tuple(layers),
    )


def _settings(shape: Transformer, pace: Pace) -> dict[str, Setting]:
    """Return the settings of the profile: sizes, options that differ from the default, and the rate."""
    settings = {name: value for name, value in asdict(shape).items() if value is not False}
    if shape.tensor_parallel == 1:
        del settings["tensor_parallel"]
    return {"formula": "transformer", **settings, "rate": f"{pace.flops_per_s / 1e12:g} TFLOP/s"}


def _whole(shape: Transformer) -> float:
    """Return the elements of sh that each device has of a tensor that tensor parallelism leaves whole."""
    return shape.sequence * shape.hidden / (shape.tensor_parallel if shape.sequence_parallel else 1)


def _embedding(shape: Transformer, widths: Widths) -> _Layer:
    words = shape.vocabulary * shape.hidden // shape.tensor_parallel
    output_bytes = widths.activation * _whole(shape)
    return _Layer(
        name="embedding",
        parameters=words + shape.sequence * shape.hidden,
        largest_weight=words,
        # Looking rows up takes no FLOP.
        forward_flops=0.0,
        input_flops=0.0,
        weight_flops=0.0,
        output_bytes=output_bytes,
        # With the mask of a dropout.
        saved_bytes=output_bytes + _whole(shape),
        weight_held_bytes=output_bytes,
    )


def _block(shape: Transformer, widths: Widths, name: str) -> _Layer:
    s, h, f, t, e = shape.sequence, shape.hidden, shape.feed_forward, shape.tensor_parallel, widths.activation
    # Queries, keys, values and the result of attention; input and output of the activation function.
    split_bytes = e * (4 * s * h + 2 * s * f) / t
    # The softmax, the mask of its dropout, and the result of the dropout.
    scores_bytes = shape.heads * s**2 * (2 * e + 1) / t if shape.keep_scores else 0.0
    # Attention has products without weights: two in forward, of which the backward makes four, all in I.
    products = (8 * s * h**2 + 4 * s * h * f) / t
    attention = 4 * s**2 * h / t
    return _Layer(
        name=name,
        # Biases after a split sum, and both normalizations, are whole on each device.
        parameters=(4 * h**2 + 2 * h * f + 3 * h + f) // t + 6 * h,
        largest_weight=h * max(f, 3 * h) // t,
        forward_flops=products + attention,
        input_flops=products + 2 * attention,
        weight_flops=products,
        output_bytes=e * _whole(shape),
        # Inputs and outputs of two normalizations, masks of two dropouts. The previous layer counts the first input
        # as its output; this layer counts its own output instead.
        saved_bytes=_whole(shape) * (4 * e + 2) + split_bytes + scores_bytes,
        weight_held_bytes=_whole(shape) * 4 * e + split_bytes,
    )


def _head(shape: Transformer, widths: Widths) -> _Layer:
    s, h, e = shape.sequence, shape.hidden, widths.activation
    words = shape.vocabulary * h // shape.tensor_parallel
    logits = s * shape.vocabulary / shape.tensor_parallel
    flops = 2 * h * logits
    return _Layer(
        name="head",
        parameters=words + 2 * h,
        largest_weight=words,
        forward_flops=flops,
        input_flops=flops,
        weight_flops=flops,
        output_bytes=0.0,  # the loss: a number
        saved_bytes=e * _whole(shape) + 4 * logits,
        weight_held_bytes=e * _whole(shape) + e * logits,
        transient_bytes=e * logits,
    )


def _costs(
    layer: _Layer, shape: Transformer, widths: Widths, pace: Pace, *, sizes: tuple[int, ...], steps_at_once: bool
) -> LayerProfile:
    """Return the layer's profile at every size."""

    def times_us(flops: float) -> tuple[float, ...]:
        return tuple(b * flops / pace.flops_per_s * 1e6 for b in sizes)

    def each(bytes_of_one: float, more: int = 0) -> tuple[int, ...]:
        return tuple(round(b * bytes_of_one) + more for b in sizes)

    tied = {"embedding": "head", "head": "embedding"}.get(layer.name) if shape.tied else None
    # Every number of the state is read and written once, gradients are read.
    touched = 2 * widths.parameter + widths.gradient + 2 * widths.optimizer
    return LayerProfile(
        name=layer.name,
        digest=sha256(repr((layer.name.partition("_")[0], shape, widths, sizes)).encode()).hexdigest()[:16],
        parameter_bytes=widths.parameter * layer.parameters,
        gradient_bytes=widths.gradient * layer.parameters,
        optimizer_bytes=widths.optimizer * layer.parameters,
        cast_bytes=widths.cast * layer.parameters,
        tied=(f"{tied}.weight",) if tied else (),
        tied_bytes=widths.parameter * layer.largest_weight if tied else 0,
        optimizer_us=layer.parameters * touched / pace.bytes_per_s * 1e6 if pace.bytes_per_s else 0.0,
        optimizer_peak_bytes=widths.parameter * layer.parameters if steps_at_once else 0,
        forward_us=times_us(layer.forward_flops),
        backward_us=times_us(layer.input_flops + layer.weight_flops),
        backward_input_us=times_us(layer.input_flops),
        backward_weight_us=times_us(layer.weight_flops),
        output_bytes=each(layer.output_bytes),
        saved_bytes=each(layer.saved_bytes),
        weight_held_bytes=each(layer.weight_held_bytes),
        forward_peak_bytes=each(layer.transient_bytes),
        backward_peak_bytes=each(layer.transient_bytes, widths.parameter * layer.largest_weight),
        forward_flops=each(layer.forward_flops),
    )
