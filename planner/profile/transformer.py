"""A transformer as a chain of layers, by published formulas: for plans before there is code, or a device.

    s   tokens of a sample           h   width                   V   words
    b   samples of a micro-batch     f   width of the            t   devices that share each layer
    a   heads                            feed-forward layers     e   bytes of an activation

FLOP of one micro-batch, those of all t devices together (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", arXiv:2104.04473; in halves as in Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241, table 1; both have f = 4h):

                  F                           I                           W
    block         8bsh^2 + 4bshf + 4bs^2h     8bsh^2 + 4bshf + 8bs^2h     8bsh^2 + 4bshf
    head          2bshV                       2bshV                       2bshV

Bytes that each device keeps of one micro-batch for its backward (Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", arXiv:2205.05198, equations 1 to 4, where f = 4h and e = 2). Each of the t devices has its
part of what is split, and all of what is whole, unless sequence parallelism splits that as well:

                  whole                split
    embedding     bsh (e + 1)          -
    block         bsh (4e + 2)         e (4bsh + 2bsf) / t, and where scores are kept abs^2 (2e + 1) / t
    head          bsh e                4bsV / t: logits in float32

From I to W a block keeps what its products read and the gradients of what they make: 4bsh e whole, and split
e (4bsh + 2bsf) / t, which is 32bsh in the papers' case. The formulas know no layer's transients. Counted here are the
gradient of a layer's largest weight, which is there before it is added to that of earlier micro-batches, and the head's
logits once more.

Not counted: what the t devices send each other, operators that are bound by memory rather than by FLOP, what kernels
take for themselves. A rate that a device was seen to sustain has the first two in it.
"""

from dataclasses import asdict, dataclass
from hashlib import sha256

from planner.core.values.profile import GENERATOR, Device, Environment, LayerProfile, Model, Profile, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The shape of a decoder with learned positions and biases, as GPT-2 and GPT-3 have it."""

    layers: int
    """Blocks between embedding and head."""
    hidden: int
    """h."""
    heads: int
    sequence: int
    """s."""
    vocabulary: int
    """V."""
    feed_forward: int
    """f."""
    tensor_parallel: int = 1
    """t."""
    sequence_parallel: bool = False
    """Whether what tensor parallelism leaves whole is split along the sequence."""
    keep_scores: bool = False
    """Whether attention keeps its scores for backward, as it does where no kernel fuses it."""
    tied: bool = False
    """Whether the head has the embedding's weights."""

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, on all t devices together: 12h^2 + 13h where f = 4h."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.feed_forward + 9 * self.hidden + self.feed_forward

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        words = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.block_parameters + words + (self.sequence + 2) * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of one activation, and of what there is for each parameter."""

    activation: int
    """e."""
    parameter: int
    gradient: int
    optimizer: int
    """The optimizer's state; master copies of parameters are part of it."""
    cast: int = 0
    """Autocast's copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a device gets done."""

    flops_per_s: float
    bytes_per_s: float = 0.0
    """Between its memory and its cores, which bounds the optimizer's step; 0: not known, and the step takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer on one of the t devices, for one sample: what takes a micro-batch of b takes b times as much."""

    name: str
    parameters: int
    largest_weight: int
    """Parameters."""
    forward_flops: float
    input_flops: float
    weight_flops: float
    output_bytes: float
    saved_bytes: float
    weight_held_bytes: float
    transient_bytes: float = 0.0
    """In forward, and in backward beside the gradient of the largest weight."""


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
    """The profile of a transformer: embedding, blocks, head with the loss.

    Args:
        shape: The model.
        widths: Bytes of its numbers.
        pace: What a device sustains.
        device: The device, as the profile is to name it.
        dtype: The precision, as the profile is to name it.
        optimizer: Its name.
        micro_batch_sizes: Sizes, in samples.
        steps_at_once: Whether the optimizer takes all parameters at once, with a copy of them as transient.

    Returns:
        A profile with `how: estimated` in its device, halves of backwards included.
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
    """What the profile was made from: sizes, whatever is not usual, and the rate."""
    settings = {name: value for name, value in asdict(shape).items() if value is not False}
    if shape.tensor_parallel == 1:
        del settings["tensor_parallel"]
    return {"formula": "transformer", **settings, "rate": f"{pace.flops_per_s / 1e12:g} TFLOP/s"}


def _whole(shape: Transformer) -> float:
    """The elements of sh that each device has of what tensor parallelism leaves whole."""
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
    # Queries, keys, values and what attention returns; what goes into the activation function, and what comes out.
    split_bytes = e * (4 * s * h + 2 * s * f) / t
    # The softmax, the mask of its dropout, and what that leaves.
    scores_bytes = shape.heads * s**2 * (2 * e + 1) / t if shape.keep_scores else 0.0
    # Attention has products without weights: two in forward, of which the backward makes four, all in I.
    products = (8 * s * h**2 + 4 * s * h * f) / t
    attention = 4 * s**2 * h / t
    return _Layer(
        name=name,
        # Biases behind a split sum, and both normalisations, are whole on each device.
        parameters=(4 * h**2 + 2 * h * f + 3 * h + f) // t + 6 * h,
        largest_weight=h * max(f, 3 * h) // t,
        forward_flops=products + attention,
        input_flops=products + 2 * attention,
        weight_flops=products,
        output_bytes=e * _whole(shape),
        # What goes into and comes out of two normalisations, masks of two dropouts. The layer in front counts
        # the first one's input as its output; this layer counts its own output in place of that.
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
    """The layer at every size, in the words of a profile."""

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
