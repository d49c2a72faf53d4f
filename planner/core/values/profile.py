"""Profile: the costs of a chain of layers, by layer and micro-batch size.

These are the values behind `profile.yaml`; `docs/file-formats.md` describes every field. Lists have one value per entry
of `Profile.micro_batch_sizes`. An empty list means zeros.
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
"""Labels over which a model's own loss is the mean: none, all that are not -100, or all but the first of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Tool that wrote a file."""

    name: str
    version: str


GENERATOR: Final = Generator(name="gpipe-plan", version=__version__)
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
    """Labels among the inputs that weight the losses of micro-batches; empty if samples do."""
    batch_norm: bool = field(default=False, metadata=LEFT_OUT)
    """True if a layer normalizes by the statistics of its micro-batch."""
    digest: str = ""
    """Digest `sha256:…` of structure, names, shapes, dtypes and settings, but not of weights."""
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device on which the numbers were measured."""

    kind: str
    name: str = ""
    memory_bytes: int = 0
    reserve_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Memory that no tensor can use (context, libraries): the solver's default of `--reserve`."""
    how: Literal["measured", "compiled", "estimated"] = "measured"
    executor: ExecutorCost | None = None
    """Costs of the bundled executor between two processes: the solver's defaults for link and overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions and settings that the numbers depend on."""

    torch: str = ""
    python: str = ""
    dtype: str = "float32"
    """Dtype of the parameters as built, or the value of `--dtype` (`planner.core.values.precision`)."""
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """Tensor that crosses the boundary after a layer, for one micro-batch."""

    bytes: int
    """Size of its storage."""
    kept: bool
    """True if the layer saves that storage for backward."""
    alias: int = -1
    """Index of the tensor whose storage it shares (a view, or written in place); -1 for its own storage.

    Indices count the inputs first, then the earlier outputs.
    """
    relayed: bool = False
    """True if it is an input passed through unchanged: its gradient, if any, becomes the input's gradient."""
    carries: bool = True
    """True if it carries a gradient. Masks and integers carry none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDetail:
    """Exact memory record of one layer at one micro-batch size; the peak of any stage is computed from it.

    Peaks are bytes above the memory in use when the layer starts, which includes its input.
    """

    internal_bytes: int
    """Bytes saved for backward that are neither input, output, parameter nor buffer."""
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    forward_peak_bytes: int
    """Peak during forward with gradients."""
    no_grad_peak_bytes: int
    """Peak during forward without gradients, as in a forward that will be recomputed."""
    first_backward_peak_bytes: int
    """Peak during the first micro-batch's backward, which allocates the gradients; includes the saved tensors."""
    backward_peak_bytes: int
    """Peak during a later backward, without the gradients into which it accumulates."""
    end_first_backward_peak_bytes: int | None = None
    """Peak during the first backward at the end of a stage, including outputs and their gradients."""
    end_backward_peak_bytes: int | None = None
    writes_input: bool = False
    """True if it writes into its input: a stage that begins with it works on a copy."""
    target_bytes: int = 0
    """Last layer only: the targets that its loss reads."""
    attribute_bytes: int = 0
    """Tensors in plain attributes of the layer's modules, held from one forward to the next.

    Parameters and buffers are not included, but the bytes by which forwards enlarge buffers are.
    """
    renewed_bytes: int = 0
    """Part of `attribute_bytes` that each forward creates and its backward reads, such as a pruned weight.

    Every micro-batch in flight holds its own.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMemory:
    """Exact memory record of one layer with a split backward, at one micro-batch size.

    Peaks are bytes above the memory in use when the pass starts, which includes what the layer holds by then.
    """

    held_bytes: int
    """Bytes held from the input-gradient (I) to the weight-gradient (W) pass, including the layer's input if held."""
    held_input_bytes: int = 0
    """Part of `held_bytes` that is the layer's input."""
    weight_gradient_bytes: int
    """Part of `LayerProfile.gradient_bytes` that W creates; I creates the rest."""
    first_input_peak_bytes: int
    """Peak during the first micro-batch's I, including the gradients that it creates."""
    input_peak_bytes: int
    """Peak during a later I."""
    output_first_input_peak_bytes: int | None = None
    """Peak during the first I if the next layer holds its input for its W; includes the outputs."""
    output_input_peak_bytes: int | None = None
    end_first_input_peak_bytes: int | None = None
    """Peak during the first I at the end of a stage, including outputs and their gradients."""
    end_input_peak_bytes: int | None = None
    first_weight_peak_bytes: int
    """Peak during the first W, including the gradients that it creates."""
    weight_peak_bytes: int
    """Peak during a later W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayKind:
    """Arrays of one shape and type; those of different stages can reuse the same memory."""

    kind: str
    """Type and shape: `float32[8,64,256]`."""
    bytes: int
    """Size of one array, including padding."""
    plain_bytes: int
    """Size without padding."""
    loop_bytes: int
    """Size as an array of a loop, in the layout of its reader; half if only matmuls read it, which take 16 bits."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Memory of a layer of a compiled profile within one program, at one micro-batch size, including padding.

    A compiler that sees forward and backward of a micro-batch at once keeps less than a loop over micro-batches, whose
    arrays hold everything saved. It also releases a layer's memory when its backward is done.
    """

    carried_bytes: int
    """Bytes held from the layer's forward to its backward, including its output if a later layer reads it."""
    peak_bytes: int
    """Peak of forward and backward above what earlier layers hold, including gradients of input and output."""
    narrowed_bytes: int = 0
    """Copies of its weights in the type of matmul operands, which a loop over micro-batches holds throughout."""
    padding_bytes: int = 0
    """Padding of its trained parameters, and again of their gradients."""
    reshaped_bytes: int = 0
    """Transient copies, in the layer's shape, of arrays that loops store in rows and its backward reads."""
    input_bytes: int = 0
    """First layer only: its part of the mini-batch."""
    narrowed_input_bytes: int = 0
    """First layer only: copy of the mini-batch's part in the type of matmul operands, which a loop holds throughout."""
    laid_out_bytes: int = 0
    """First layer only: such a copy of the running micro-batch, in the layer's layout."""
    target_bytes: int = 0
    """Last layer only: the targets that its loss reads, of the mini-batch's part."""
    trained: tuple[ArrayKind, ...] = ()
    """Trained parameters."""
    kept: tuple[ArrayKind, ...] = ()
    """Arrays that it saves for backward in loops over micro-batches."""
    received: tuple[ArrayKind, ...] = ()
    """Arrays that cross the boundary before it; of the first layer its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGroup:
    """Parameters that a layer shares with the same earlier layers."""

    layers: tuple[str, ...]
    """Names of these layers, in order."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Costs of one layer. Times in microseconds and bytes are for one micro-batch, one per micro-batch size."""

    name: str
    modules: tuple[str, ...] = ()
    """Paths of its modules in execution order, if `name` is not the only one."""
    digest: str = ""
    """Digest; layers with equal digests run the same operators on the same shapes and were measured once."""
    parameter_bytes: int
    gradient_bytes: int | None = None
    """Gradients that backward creates; defaults to `parameter_bytes`."""
    idle_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Trained parameters that never get a gradient, such as those of an unused head; replicas create zeros for them."""
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    """Buffers, and the memory that collects running statistics of whole mini-batches."""
    cast_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Low-precision copies of parameters in autocast's weight cache."""
    rewritten_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Buffers and frozen parameters that each forward writes; a micro-batch to be recomputed keeps the old values."""
    tied: tuple[str, ...] = ()
    """Names of parameters in other layers that share storage with one of this layer."""
    tied_bytes: int = 0
    """Part of `parameter_bytes` that is so shared."""
    tied_groups: tuple[TiedGroup, ...] = ()
    """Shared parameters by group; empty if all of `tied_bytes` are shared with the same earlier layers."""
    optimizer_us: float = 0.0
    """Time of the optimizer's step over this layer's parameters, once per mini-batch."""
    optimizer_peak_bytes: int = 0
    """Transient bytes of that step."""
    optimizer_boundary_peak_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Transient bytes as that step proceeds to this layer from the previous one, if a stage has both."""
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    """Backward time, without recomputation."""
    backward_input_us: tuple[float, ...] = ()
    """Time of the input-gradient pass (I).

    It includes the additional time of its forward, compared with the forward of a whole backward.
    """
    backward_weight_us: tuple[float, ...] = ()
    """Time of the weight-gradient pass (W). I and W together need not take `backward_us`."""
    spread: tuple[float, ...] = ()
    """Relative half-width of the 95 % interval of forward + backward."""
    output_bytes: tuple[int, ...]
    """Bytes of all tensors that cross the boundary after this layer."""
    saved_bytes: tuple[int, ...]
    """Bytes that this layer saves for backward; see `docs/cost-model.md`."""
    weight_held_bytes: tuple[int, ...] = ()
    """Bytes that it holds between the two passes of a split backward."""
    forward_peak_bytes: tuple[int, ...] = ()
    backward_peak_bytes: tuple[int, ...] = ()
    forward_flops: tuple[int, ...] = ()
    collective_bytes: tuple[int, ...] = ()
    """Bytes that the GPUs of a group sum in a forward, over all of its all-reduces; the backward sums as many.

    Empty if there are none, or if the times include them, as measured times do.
    """
    collectives: int = field(default=0, metadata=LEFT_OUT)
    """Number of these all-reduces in a forward, and again in the backward."""
    detail: tuple[MemoryDetail, ...] = ()
    split: tuple[SplitMemory, ...] = ()
    """Memory records of the split backward, in addition to `detail`."""
    program: tuple[ProgramMemory, ...] = ()
    """Memory records of a compiled profile, instead of `detail`."""

    @property
    def trained_bytes(self) -> int:
        """Bytes of the gradients; as many as of the parameters where the profile does not say."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Costs of the same layers if each is shared by another number of GPUs."""

    tensor_parallel: int
    """GPUs that share each layer; every figure of `layers` is for one of them."""
    layers: tuple[LayerProfile, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """Costs of a model on a device."""

    schema: Literal["gpipe-plan/profile/v1"] = PROFILE_SCHEMA
    generator: Generator | None = None
    model: Model = field(default_factory=Model)
    proof: Proof | None = None
    """Result of the equivalence check; None if it was not run."""
    device: Device
    environment: Environment = field(default_factory=Environment)
    optimizer: str = ""
    optimizer_peak: Literal["largest", "sum"] = "largest"
    """Rule for combining the layers' `optimizer_peak_bytes`: the largest one, or the sum if the optimizer updates all
    parameters at once (`foreach`)."""
    micro_batch_sizes: tuple[int, ...]
    tensor_parallel: int = field(default=1, metadata=LEFT_OUT)
    """GPUs that share each layer; every figure of `layers` is for one of them."""
    expert_parallel: int = field(default=1, metadata=LEFT_OUT)
    """Replicas that divide the experts of each layer among them; a number of replicas must be a multiple of it."""
    layers: tuple[LayerProfile, ...]
    widths: tuple[Width, ...] = ()
    """The same layers, shared by other numbers of GPUs."""

    def __repr__(self) -> str:
        """Return a line that names what was profiled."""
        return (
            f"Profile(model={self.model.source!r}, device={self.device.kind!r}, how={self.device.how!r}, "
            f"layers={len(self.layers)}, micro_batch_sizes={self.micro_batch_sizes})"
        )
