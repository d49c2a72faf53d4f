"""The profile: what a chain of layers costs, layer by layer and micro-batch size by micro-batch size.

These are the values behind `profile.yaml`; `docs/file-formats.md` describes every field. Lists follow
`Profile.micro_batch_sizes`. An empty list means zeros.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner import __version__
from planner.core.values.cluster import ExecutorCost
from planner.core.values.proof import Proof

PROFILE_SCHEMA: Final = "gpipe-plan/profile/v1"

Setting = bool | int | float | str
"""A value given by `--set name=value`."""

Granularity = Literal["coarse", "fine"]
"""How finely a model is cut into layers: about one per block, or parts of blocks too."""


CountedLabels = Literal["", "all", "shifted"]
"""Labels that a model's own loss is the mean of: none, all that are not -100, or those but for the first of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """The tool that wrote a file."""

    name: str
    version: str


GENERATOR: Final = Generator(name="gpipe-plan", version=__version__)
"""This version of gpipe-plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model was profiled."""

    source: str = ""
    """`path/to/model.py:entry` as given on the command line."""
    settings: dict[str, Setting] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    """The `--input` options, where the model file has no `example_batch`."""
    granularity: Granularity = "coarse"
    uncut: tuple[str, ...] = ()
    """Layers that were to end a stage, by their names then, and that the stages behind did not come out right of: each
    is one layer with the next now."""
    counted_labels: CountedLabels = ""
    """Labels among the inputs that weight the losses of micro-batches; none where samples do."""
    batch_norm: bool = False
    """Whether a layer normalizes by the statistics of its micro-batch."""
    digest: str = ""
    """`sha256:…` over structure, names, shapes, dtypes and settings; weights do not count."""
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the numbers were taken on."""

    kind: str
    name: str = ""
    memory_bytes: int = 0
    reserve_bytes: int = 0
    """What of it no tensor can have (context, libraries): the solver's default for `--reserve`."""
    how: Literal["measured", "compiled", "estimated"] = "measured"
    executor: ExecutorCost | None = None
    """What the bundled executor costs between two processes there: the solver's default for link and overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions and settings the numbers depend on."""

    torch: str = ""
    python: str = ""
    dtype: str = "float32"
    """The parameters', as the model is built; else what `--dtype` asked for (`planner.core.values.precision`)."""
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """One tensor that crosses the boundary behind a layer, for one micro-batch."""

    bytes: int
    """Size of its storage."""
    kept: bool
    """Whether the layer itself keeps that storage for backward."""
    alias: int = -1
    """Whose storage it shares (a view, or written in place): the input of that index, or, counting on behind the
    inputs, an output before it; -1 for a storage of its own."""
    relayed: bool = False
    """Whether it is an input that only passes by: its gradient, if it has one, becomes that input's as it is."""
    carries: bool = True
    """Whether it carries a gradient. Masks and integers carry none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDetail:
    """Exact memory record of one layer at one micro-batch size, from which the peak of any stage is composed.

    Peaks are bytes above what is alive when the layer starts (its input included in what is alive).
    """

    internal_bytes: int
    """Kept for backward, neither input, output, parameter nor buffer."""
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    forward_peak_bytes: int
    """Highest during forward with gradients."""
    no_grad_peak_bytes: int
    """Highest during forward without gradients: what a forward that will be recomputed needs."""
    first_backward_peak_bytes: int
    """Highest during the first micro-batch's backward, which allocates the gradients; what forward kept included."""
    backward_peak_bytes: int
    """Highest during a later backward, which accumulates into the gradients (not counted)."""
    end_first_backward_peak_bytes: int | None = None
    """Highest during the first backward where a stage ends: outputs and their gradients are held, and counted."""
    end_backward_peak_bytes: int | None = None
    writes_input: bool = False
    """Whether it writes into its input: a stage that begins with it works on a copy."""
    target_bytes: int = 0
    """Last layer only: the targets its loss reads."""
    attribute_bytes: int = 0
    """Tensors that plain attributes of the layer's modules hold after a forward, and until the next one replaces them:
    neither parameters nor buffers. Includes the bytes by which forwards enlarge buffers."""
    renewed_bytes: int = 0
    """The part of `attribute_bytes` that each forward makes anew and its backward reads, such as a pruned weight: a
    micro-batch that waits for its backward keeps its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMemory:
    """Exact memory record of one layer whose backward runs in halves, at one micro-batch size.

    Peaks are bytes above what is alive when the half of the layer starts, what it holds by then included.
    """

    held_bytes: int
    """Kept from I to W, the layer's input included if it is."""
    held_input_bytes: int = 0
    """The part of it that is the layer's input."""
    weight_gradient_bytes: int
    """Gradients that W makes, of `LayerProfile.gradient_bytes`; I makes the others."""
    first_input_peak_bytes: int
    """Highest during the first micro-batch's I, the gradients that it makes included."""
    input_peak_bytes: int
    """Highest during a later I."""
    output_first_input_peak_bytes: int | None = None
    """Highest during the first I where the layer behind keeps its input for its W: outputs are held, and counted."""
    output_input_peak_bytes: int | None = None
    end_first_input_peak_bytes: int | None = None
    """Highest during the first I where a stage ends: outputs and their gradients are held, and counted."""
    end_input_peak_bytes: int | None = None
    first_weight_peak_bytes: int
    """Highest during the first W, the gradients that it makes included."""
    weight_peak_bytes: int
    """Highest during a later W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayKind:
    """Arrays of one shape and type: those of different stages can take turns in one place."""

    kind: str
    """Type and shape: `float32[8,64,256]`."""
    bytes: int
    """Size of one, padding included."""
    plain_bytes: int
    """Size without padding."""
    loop_bytes: int
    """Size in the arrays of loops: half where nothing but products reads it, which take 16 bits; and as that which
    reads it wants it to lie."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """What a layer of a compiled profile needs within one program, at one micro-batch size; padding included.

    A compiler that sees forward and backward of a micro-batch at once keeps less than a loop over micro-batches can,
    whose arrays say what is kept; and it lets go of a layer's part when its backward is done.
    """

    carried_bytes: int
    """Held from the layer's forward to its backward, its output included if a layer behind reads that."""
    peak_bytes: int
    """Highest of forward and backward above what layers in front hold, gradients of input and output included."""
    narrowed_bytes: int = 0
    """Copies of its weights as products take them, which a loop over micro-batches holds from begin to end."""
    padding_bytes: int = 0
    """Padding of its trained parameters, and once more of their gradients."""
    reshaped_bytes: int = 0
    """What its backward reads and loops hold in rows, in its own shape: part of the backward's transients."""
    input_bytes: int = 0
    """First layer only: the mini-batch's part."""
    narrowed_input_bytes: int = 0
    """First layer only: a copy of the mini-batch's part as products take it, which a loop holds of all of it."""
    laid_out_bytes: int = 0
    """First layer only: the same as the layer wants it to lie, of the micro-batch that runs."""
    target_bytes: int = 0
    """Last layer only: the targets its loss reads, of the mini-batch's part."""
    trained: tuple[ArrayKind, ...] = ()
    """Its parameters that are trained."""
    kept: tuple[ArrayKind, ...] = ()
    """What it adds to what is held for backward, in loops over micro-batches."""
    received: tuple[ArrayKind, ...] = ()
    """What crosses the boundary in front of it; of the first layer its input."""


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
    """Paths of its modules in execution order, where it is more than the one that it is named after."""
    digest: str = ""
    """Layers with the same digest run the same operators on the same shapes and were measured once."""
    parameter_bytes: int
    gradient_bytes: int | None = None
    """Gradients that backward makes; defaults to `parameter_bytes`."""
    idle_bytes: int = 0
    """Trained parameters that never get a gradient, such as those of an unused head. Replicas make zeros for them."""
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    """Buffers, and what running statistics of whole mini-batches are collected in."""
    cast_bytes: int = 0
    """Low-precision copies of parameters that autocast makes once and keeps until it is left."""
    rewritten_bytes: int = 0
    """Buffers and frozen parameters that each forward writes: a micro-batch that is to be recomputed keeps the old."""
    tied: tuple[str, ...] = ()
    """Names of parameters in other layers that share storage with one of this layer."""
    tied_bytes: int = 0
    """How many of `parameter_bytes` are so shared."""
    tied_groups: tuple[TiedGroup, ...] = ()
    """Left out where all of `tied_bytes` are shared with the same earlier layers."""
    optimizer_us: float = 0.0
    """The optimizer's step over this layer's parameters, once per mini-batch."""
    optimizer_peak_bytes: int = 0
    """Transient bytes of that step."""
    optimizer_boundary_peak_bytes: int = 0
    """Transient bytes as that step goes on to this layer from the one in front, if a stage has both."""
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    """Recomputation not included."""
    backward_input_us: tuple[float, ...] = ()
    """I: the gradient of the input, and everything else but what `backward_weight_us` is for.

    What its forward takes longer than that of a backward in one piece is in it, too.
    """
    backward_weight_us: tuple[float, ...] = ()
    """W: the gradients of weights that are put off. Both halves together need not take `backward_us`."""
    spread: tuple[float, ...] = ()
    """Relative half-width of the 95 % interval of forward + backward."""
    output_bytes: tuple[int, ...]
    """Everything that crosses the boundary behind this layer."""
    saved_bytes: tuple[int, ...]
    """What this layer adds to what is held for backward; see `docs/cost-model.md`."""
    weight_held_bytes: tuple[int, ...] = ()
    """What it adds to what is held between the halves of a backward."""
    forward_peak_bytes: tuple[int, ...] = ()
    backward_peak_bytes: tuple[int, ...] = ()
    forward_flops: tuple[int, ...] = ()
    detail: tuple[MemoryDetail, ...] = ()
    split: tuple[SplitMemory, ...] = ()
    """What the halves of a backward need, beside `detail`."""
    program: tuple[ProgramMemory, ...] = ()
    """What a compiled profile has in place of `detail`."""

    @property
    def trained_bytes(self) -> int:
        """Bytes of the gradients; as many as of the parameters where the profile does not say."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """Everything the planner knows of a model and a device."""

    schema: Literal["gpipe-plan/profile/v1"] = PROFILE_SCHEMA
    generator: Generator | None = None
    model: Model = field(default_factory=Model)
    proof: Proof | None = None
    """What its stages were found to compute; None where nobody has looked."""
    device: Device
    environment: Environment = field(default_factory=Environment)
    optimizer: str = ""
    optimizer_peak: Literal["largest", "sum"] = "largest"
    """How layers' `optimizer_peak_bytes` add up: parameter by parameter, or all at once (`foreach`)."""
    micro_batch_sizes: tuple[int, ...]
    layers: tuple[LayerProfile, ...]

    def __repr__(self) -> str:
        """Return in one line what was profiled."""
        return (
            f"Profile(model={self.model.source!r}, device={self.device.kind!r}, how={self.device.how!r}, "
            f"layers={len(self.layers)}, micro_batch_sizes={self.micro_batch_sizes})"
        )
