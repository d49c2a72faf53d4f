"""Profile: the costs of a chain of layers, by layer and micro-batch size.

The values are stored in `profile.yaml`; `docs/file-formats.md` describes all fields except those of `ProgramMemory`.
Lists have one value per entry of `Profile.micro_batch_sizes`. An empty list means zeros.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner import __version__
from planner.core.values.cluster import ExecutorCost
from planner.core.values.left_out import LEFT_OUT
from planner.core.values.proof import Proof

PROFILE_SCHEMA: Final = "gpipe-plan/profile/v1"

Setting = bool | int | float | str
"""Value given by `--set name=value`."""

Granularity = Literal["coarse", "fine"]
"""Granularity of layers: about one layer per block, or also parts of blocks."""


CountedLabels = Literal["", "all", "shifted"]
"""Labels over which a model averages its own loss.

`all` are the labels that are not -100; `shifted` are these without the first label of each sample. If the text is
empty, the loss is a mean over samples, and a micro-batch's weight is its number of samples.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingTool:
    """Tool that wrote a file."""

    name: str
    version: str


THIS_TOOL: Final = WritingTool(name="gpipe-plan", version=__version__)
"""This version of gpipe-plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Model that was profiled."""

    source: str = ""
    """Source as given on the command line: `path/to/model.py:entry`."""
    settings: dict[str, Setting] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    """`--input` options, if the model file has no `example_batch`."""
    granularity: Granularity = "coarse"
    uncut: tuple[str, ...] = ()
    """Layers, by their original names, after which a cut gave wrong results; each is now merged with the next layer."""
    counted_labels: CountedLabels = ""
    """Labels over which the model averages its own loss. Their number is the weight of a micro-batch."""
    sample_tokens: int = field(default=0, metadata=LEFT_OUT)
    """Tokens of a sample: length of the longest input of token ids; 0 without such inputs."""
    batch_norm: bool = field(default=False, metadata=LEFT_OUT)
    """True if a layer normalizes by the statistics of the micro-batch (batch normalization)."""
    digest: str = ""
    """Digest `sha256:…` of structure, names, shapes, dtypes and settings, but not of weights."""
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device on which a model was profiled."""

    kind: str
    name: str = ""
    memory_bytes: int = 0
    reserve_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Memory that no tensor can use (context, libraries), in bytes; default of `solve --reserve`."""
    how: Literal["measured", "compiled", "estimated"] = "measured"
    executor: ExecutorCost | None = None
    """Costs of the bundled executor, measured with two processes; the solver's defaults for link and overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions and settings on which the recorded times and sizes depend."""

    torch: str = ""
    python: str = ""
    dtype: str = "float32"
    """Dtype of the parameters as built, or the value of `--dtype` (`planner.core.values.precision`)."""
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """Tensor that crosses the boundary after a layer, for one micro-batch."""

    bytes: int
    """Size of the tensor's storage."""
    kept: bool
    """True if the layer saves the tensor's storage for backward."""
    alias: int = -1
    """Index of the tensor whose storage this tensor shares, counting inputs first, then earlier outputs; -1 if none."""
    relayed: bool = False
    """True if the tensor is an unchanged input of the layer; its gradient, if any, becomes the input's gradient."""
    carries: bool = True
    """True if the tensor carries a gradient. Masks and integers carry none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDetail:
    """Exact memory of one layer at one micro-batch size.

    A peak is the additional memory relative to the start of the layer's forward, when its input is already in memory.
    """

    internal_bytes: int
    """Memory saved for backward that is not an input, output, parameter or buffer, in bytes."""
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    forward_peak_bytes: int
    """Peak during forward with gradients."""
    no_grad_peak_bytes: int
    """Peak during a forward without gradients, which is later repeated by recomputation."""
    first_backward_peak_bytes: int
    """Peak during the first micro-batch's backward, including saved tensors and the new parameter gradients."""
    backward_peak_bytes: int
    """Peak during any backward except the first, including saved tensors, without parameter gradients."""
    end_first_backward_peak_bytes: int | None = None
    """`first_backward_peak_bytes` if the layer ends a stage, including the layer's outputs and their gradients."""
    end_backward_peak_bytes: int | None = None
    """`backward_peak_bytes` if the layer ends a stage, including the layer's outputs and their gradients."""
    writes_input: bool = False
    """True if the layer writes into its input. A stage that begins with such a layer works on a copy."""
    target_bytes: int = 0
    """Last layer only: memory of the targets that the loss reads."""
    attribute_bytes: int = 0
    """Memory that forwards leave in plain attributes of the layer's modules, plus the growth of buffers in forwards."""
    renewed_bytes: int = 0
    """Part of `attribute_bytes` that each micro-batch in flight creates for its backward, such as a pruned weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMemory:
    """Exact memory of one layer with a split backward, at one micro-batch size.

    A peak is relative to the memory at the start of the layer's forward. The layer's input counts only if the layer
    keeps it for the weight-gradient pass (W). The input-gradient pass is called I. A value of None was not measured.
    """

    held_bytes: int
    """Memory stored from the input-gradient (I) to the weight-gradient pass (W), including the input if W needs it."""
    held_input_bytes: int = 0
    """Part of `held_bytes` that is the layer's input."""
    weight_gradient_bytes: int
    """Bytes of the parameter gradients that W creates; I creates the others."""
    first_input_peak_bytes: int
    """Peak during I of the first micro-batch, including the parameter gradients that I creates."""
    input_peak_bytes: int
    """Peak during I of any micro-batch except the first."""
    output_first_input_peak_bytes: int | None = None
    """`first_input_peak_bytes` if the next layer's W needs this layer's outputs, including these outputs."""
    output_input_peak_bytes: int | None = None
    """`input_peak_bytes` if the next layer's W needs this layer's outputs, including these outputs."""
    end_first_input_peak_bytes: int | None = None
    """`first_input_peak_bytes` if the layer ends a stage, including the layer's outputs and their gradients."""
    end_input_peak_bytes: int | None = None
    """`input_peak_bytes` if the layer ends a stage, including the layer's outputs and their gradients."""
    first_weight_peak_bytes: int
    """Peak during W of the first micro-batch, including the parameter gradients that W creates."""
    weight_peak_bytes: int
    """Peak during W of any micro-batch except the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayKind:
    """Arrays of one type and shape in a compiled program."""

    kind: str
    """Type and shape: `float32[8,64,256]`."""
    bytes: int
    """Size of one array, including padding."""
    plain_bytes: int
    """Size without padding."""
    loop_bytes: int
    """Size in a loop over micro-batches. A loop may store float32 operands of matmuls with 16 bits per number."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Memory of one layer in a compiled program, at one micro-batch size, including padding.

    A program either runs the forward and backward of one micro-batch, or loops over micro-batches and stores all saved
    tensors in arrays.
    """

    carried_bytes: int
    """Memory stored from the layer's forward to its backward, including the output if a later layer reads it."""
    peak_bytes: int
    """Peak of forward and backward on top of the memory of earlier layers, including gradients of input and output."""
    narrowed_bytes: int = 0
    """16-bit copies of weights for matmuls, which exist during a whole loop over micro-batches."""
    padding_bytes: int = 0
    """Padding of the trained parameters. The padding of their gradients is equally large, and not included."""
    reshaped_bytes: int = 0
    """Transient copies of flattened arrays, in the shape that the layer's backward reads."""
    input_bytes: int = 0
    """First layer only: memory of the inputs of one micro-batch."""
    narrowed_input_bytes: int = 0
    """First layer only: 16-bit copy of one micro-batch's inputs. A loop over micro-batches keeps all these copies."""
    laid_out_bytes: int = 0
    """First layer only: copy of one micro-batch's inputs, in the memory layout that the layer reads."""
    target_bytes: int = 0
    """Last layer only: memory of the micro-batch's targets, which the loss reads."""
    trained: tuple[ArrayKind, ...] = ()
    """Trained parameters."""
    kept: tuple[ArrayKind, ...] = ()
    """Arrays that the layer saves for backward if the program loops over micro-batches."""
    received: tuple[ArrayKind, ...] = ()
    """Arrays that cross the boundary before the layer; for the first layer, its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGroup:
    """Parameters of one layer that are all shared with the same earlier layers."""

    layers: tuple[str, ...]
    """Names of the earlier layers that share the parameters, in the order of the chain."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Costs of one layer. Tuples of times and bytes are for one micro-batch, with one value per micro-batch size."""

    name: str
    modules: tuple[str, ...] = ()
    """Paths of the layer's modules in execution order; empty if the only path is `name`."""
    digest: str = ""
    """Digest; layers with equal digests run the same operators on the same shapes and were measured once."""
    parameter_bytes: int
    gradient_bytes: int | None = None
    """Memory of the gradients that backward creates; defaults to `parameter_bytes`."""
    idle_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Trained parameters that never get a gradient, such as those of an unused head."""
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    """Buffers, and memory in which batch normalization collects the statistics of a mini-batch."""
    cast_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Low-precision copies of parameters in autocast's weight cache."""
    rewritten_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Buffers and frozen parameters that each forward writes."""
    tied: tuple[str, ...] = ()
    """Names of parameters in other layers that share storage with a parameter of this layer."""
    tied_bytes: int = 0
    """Part of `parameter_bytes` that other layers share."""
    tied_groups: tuple[TiedGroup, ...] = ()
    """Shared parameters, grouped by the earlier layers that share them; empty if there is only one group."""
    tied_view_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Size of the largest tensor that autograd allocates to add gradients of a shared parameter; 0 if it needs none."""
    optimizer_us: float = 0.0
    """Time of the optimizer's step over this layer's parameters, once per mini-batch."""
    optimizer_peak_bytes: int = 0
    """Transient memory of the optimizer's step over this layer's parameters."""
    optimizer_boundary_peak_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Transient memory while the optimizer updates a parameter of the previous layer, then one of this layer."""
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    """Backward times without recomputation, one for each micro-batch size."""
    entry_us: tuple[float, ...] = ()
    """Entry time: if a stage begins with this layer, time until the layer starts in the stage's forward."""
    backward_input_us: tuple[float, ...] = ()
    """Time of the input-gradient pass (I), plus the additional time of the forward that prepares a split backward."""
    backward_weight_us: tuple[float, ...] = ()
    """Time of the weight-gradient pass (W). The times of I and W need not add up to `backward_us`."""
    spread: tuple[float, ...] = ()
    """Relative half-width of the 95 % confidence interval of forward plus backward time, for each micro-batch size."""
    output_bytes: tuple[int, ...]
    """Bytes of all tensors that cross the boundary after this layer, one sum for each micro-batch size."""
    saved_bytes: tuple[int, ...]
    """Bytes that this layer saves for backward, for each micro-batch size; see `docs/cost-model.md`."""
    weight_held_bytes: tuple[int, ...] = ()
    """Bytes that this layer stores between the two passes of a split backward, for each micro-batch size."""
    forward_peak_bytes: tuple[int, ...] = ()
    backward_peak_bytes: tuple[int, ...] = ()
    forward_flops: tuple[int, ...] = ()
    collective_bytes: tuple[int, ...] = ()
    """Bytes that GPUs all-reduce in one forward, and also in one backward; empty if the times include all-reduces."""
    collectives: int = field(default=0, metadata=LEFT_OUT)
    """Number of all-reduces in a forward, which is also the number in a backward."""
    detail: tuple[MemoryDetail, ...] = ()
    split: tuple[SplitMemory, ...] = ()
    """Memory records of the split backward, in addition to `detail`."""
    program: tuple[ProgramMemory, ...] = ()
    """Memory records of a compiled profile, instead of `detail`."""

    @property
    def created_gradient_bytes(self) -> int:
        """Memory of the parameter gradients that backward creates, in bytes."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthCosts:
    """Costs of all layers for one tensor-parallel width (number of GPUs that share each layer)."""

    tensor_parallel: int
    """Number of GPUs that share each layer; every figure in `layers` is for one of these GPUs."""
    layers: tuple[LayerProfile, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """Costs of a model on a device."""

    schema: Literal["gpipe-plan/profile/v1"] = PROFILE_SCHEMA
    generator: WritingTool | None = None
    model: Model = field(default_factory=Model)
    proof: Proof | None = None
    """Comparison of stages with the unpartitioned model; None if it was not run."""
    device: Device
    environment: Environment = field(default_factory=Environment)
    optimizer: str = ""
    optimizer_peak: Literal["largest", "sum"] = "largest"
    """Rule to combine the layers' `optimizer_peak_bytes`; `sum` if all parameters are updated at once (`foreach`)."""
    micro_batch_sizes: tuple[int, ...]
    tensor_parallel: int = field(default=1, metadata=LEFT_OUT)
    """Number of GPUs that share each layer; every figure in `layers` is for one of these GPUs."""
    expert_parallel: int = field(default=1, metadata=LEFT_OUT)
    """Number of replicas among which each layer's experts are divided. A plan's replicas are a multiple of it."""
    fast_round_ratio: float = field(default=1.0, metadata=LEFT_OUT)
    """10th percentile of round times, divided by their median; 1 if unknown. A profiling round runs each layer once."""
    slow_round_ratio: float = field(default=1.0, metadata=LEFT_OUT)
    """90th percentile of round times, divided by their median; 1 if unknown. A profiling round runs each layer once."""
    layers: tuple[LayerProfile, ...]
    widths: tuple[WidthCosts, ...] = ()
    """Costs of the layers for other values of `tensor_parallel`."""

    def __repr__(self) -> str:
        """Return one line with the profiled model and device."""
        return (
            f"Profile(model={self.model.source!r}, device={self.device.kind!r}, how={self.device.how!r}, "
            f"layers={len(self.layers)}, micro_batch_sizes={self.micro_batch_sizes})"
        )
