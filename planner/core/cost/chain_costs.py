"""What the layers of a chain cost at one micro-batch size: the records that the laws of time and memory compute with.

All arrays have shape (L,) unless they say otherwise, times are in microseconds, sizes in bytes of one micro-batch.
Records of arrays have no equality (`eq=False`): two arrays are not equal or unequal as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.core.values.plan import Recompute
from planner.core.values.profile import LayerProfile

if TYPE_CHECKING:
    from planner.core.cost.parts import Parts
    from planner.core.cost.stages import Stages, Window

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BUCKET_BYTES = 4 * 2**20
"""Small gradients that replicas sum share a message of about this size; larger ones need no copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Layers `first` < `second` share parameters: a stage that holds both, and all between, holds these bytes once."""

    first: int
    second: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    cast_bytes: float = 0.0
    these_alone: bool = True
    """Whether these two layers are known to share so much, whatever lies between them."""
    earlier: tuple[int, ...] = ()
    """Layers in front of `first` that share the same bytes."""


ALWAYS: Final = ("parameters", "optimizer", "buffers")
"""Components of memory that are there at every moment: fields of `State`, and items of a plan's `StageMemory`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What a layer holds whatever the micro-batch, from the field of `LayerProfile` that `bytes_field` names."""

    parameters: FloatArray
    idle: FloatArray
    """Trained parameters that never get a gradient."""
    optimizer: FloatArray
    optimizer_peak: FloatArray
    """Transient bytes of the optimizer's step."""
    optimizer_boundary_peak: FloatArray
    """Transient bytes as that step goes on to a layer from the one in front of it in the same stage."""
    buffers: FloatArray
    rewritten: FloatArray
    """What of the layer's state its forward writes: kept as it was for each micro-batch that is to be recomputed."""
    casts: FloatArray
    """Copies of weights that autocast holds from the first forward of a step to its last backward."""

    @classmethod
    def of(cls, layers: Sequence[LayerProfile]) -> "State":
        """Return the state of each layer."""
        names = {each.name: bytes_field(each.name) for each in fields(cls)}
        return cls(**{name: np.array([getattr(layer, of) for layer in layers], float) for name, of in names.items()})

    @property
    def always(self) -> FloatArray:
        """Bytes that are there at every moment."""
        always: FloatArray = np.sum([getattr(self, name) for name in ALWAYS], axis=0)
        return always


def bytes_field(component: str) -> str:
    """Return the field that has a component's bytes: `cast_bytes` for `casts`."""
    return f"{component.removesuffix('s')}_bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boundaries:
    """What crosses the boundaries in front of each layer and behind it."""

    input: FloatArray
    """What crosses the boundary in front of each layer; for layer 0 the model's input."""
    output: FloatArray
    input_gradient: FloatArray
    """Gradients of `input`, of tensors that carry one."""
    output_gradient: FloatArray
    unsaved_output: FloatArray
    """The part of `output` that `Levels.saved` does not hold: what a stage that ends here holds in addition."""
    unkept_input: FloatArray
    """The part of `input` that no layer keeps: it counts in `Levels.forward` while its layer runs."""
    input_alive: FloatArray
    """The part of `input` that counts in `Levels.no_grad`."""
    copied_input: FloatArray
    """What a stage that begins here copies, because its layers write into the input they receive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """What a micro-batch leaves behind in each layer, and the highest that is alive while the layer runs.

    A level is counted from what was alive when the stage began this micro-batch, if the stage began at layer 0:
    subtract `saved[:i].sum()` for a stage that begins at layer i. Without exact records levels are transients above
    all that is held.
    """

    saved: FloatArray
    internal: FloatArray
    """The part of `saved` that never leaves the layer."""
    forward: FloatArray
    no_grad: FloatArray
    """Highest during a forward without gradients, layer by layer, input included unless it is the stage's own."""
    first_backward: FloatArray
    """During the first micro-batch's backward; parameter gradients that it allocates are counted."""
    backward: FloatArray
    """During a later backward; parameter gradients are not counted, those of `State.casts` behind the layer are."""
    end_twice_first: FloatArray
    """The part of `first_backward`, the engine's output and its gradient that is counted twice where a stage ends with
    the layer. Tensors that the layer did not make count as far as their gradients."""
    end_twice: FloatArray
    """The same part of `backward`."""
    attributes: FloatArray
    """Tensors in plain attributes, there at every moment."""
    renewed: FloatArray
    """The part of `attributes` of which each waiting micro-batch that keeps its activations has its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halves:
    """A backward in halves: I, the gradient of the input and whatever is small, and W, the gradients put off.

    Levels are as in `Levels`: of I with what the layers behind keep for W, of W with what those in front keep.
    """

    input_us: FloatArray
    weight_us: FloatArray
    held: FloatArray
    """Kept between I and W."""
    weight_gradients: FloatArray
    """The part of `ChainCosts.gradients` that W makes."""
    first_input: FloatArray
    """During the first micro-batch's I; the gradients that it makes are counted."""
    input: FloatArray
    """During a later I."""
    end_first_input: FloatArray
    """During the first I of a stage that ends with the layer; its output, and the gradient of that, are not counted."""
    end_input: FloatArray
    """The same during a later I."""
    first_weight: FloatArray
    """During the first W; the gradients that it makes are counted."""
    weight: FloatArray
    """During a later W; gradients of `State.casts` behind the layer are counted."""


class StageLaw(Protocol):
    """Records of stages with a memory law of their own: arrays of the shape of a window."""

    def parts(self, s: "Stages", recompute: Recompute, *, in_flight: int) -> "Parts":
        """Return what the stages hold; arguments as for `planner.core.cost.parts.parts_of`."""
        ...


class LayerLaw(Protocol):
    """Records of layers with a memory law of their own: a frozen dataclass of arrays."""

    def in_stages(self, window: "Window", micro_batches: int) -> StageLaw:
        """Return the records of the stages of a window."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storages:
    """The storages that cross boundaries; arrays of shape (storages,).

    Every output tensor of a layer has an entry; it is of no bytes where the tensor lies in another's storage.
    """

    maker: IntArray
    """The layer that makes the storage; -1 for the model's input."""
    until: IntArray
    """The last layer that the storage is handed to; L for the model's output."""
    kept_by_readers: FloatArray
    """Its bytes where a layer that it is handed to keeps it, else 0."""
    kept_by_maker: FloatArray
    """Its bytes where the layer that makes it keeps it, and no other, else 0."""
    kept_by_nobody: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relays:
    """Gradients of tensors that pass by some layers, one after the other, which hand them on as they are.

    Arrays of shape (relays,).
    """

    first: IntArray
    """The first of these layers."""
    last: IntArray
    bytes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainCosts:
    """Costs of L layers for micro-batches of `micro_batch_size` samples."""

    micro_batch_size: int
    names: tuple[str, ...]
    forward_us: FloatArray
    backward_us: FloatArray
    optimizer_us: FloatArray
    state: State
    optimizer_peaks_add: bool
    """Whether the optimizer works on all parameters at once, so that its transients add up."""
    ties: tuple[Tie, ...]
    gradients: FloatArray
    """What the first micro-batch's backward leaves behind."""
    boundaries: Boundaries
    target: float
    """What the loss reads beside the output."""
    levels: Levels
    composed_halves: Callable[[], Halves]
    """Composes `halves` when they are asked for: few schedules have them."""
    halves_assumed: bool
    """Whether nobody measured them: then each takes half of the backward, and everything saved is kept for W."""
    exact: bool
    """Whether the levels come from exact records; else they are the additive bound of the two transient peaks."""
    law: LayerLaw | None
    """Records of layers with a memory law of their own; None where one of the two laws of this package applies."""
    storages: Storages
    relays: Relays
    bucket_bytes: float = 0.0
    """Most that gradients take in a message to other replicas, a copy of them; 0 where there are none."""

    def of_replicas(self, replicas: int) -> "ChainCosts":
        """These costs in one of so many pipelines side by side."""
        return replace(self, bucket_bytes=float(BUCKET_BYTES) if replicas > 1 else 0.0)

    @property
    def halves(self) -> Halves:
        """A backward in halves."""
        return self.composed_halves()

    @property
    def has_backward(self) -> NDArray[np.bool_]:
        """Whether there is a backward behind each layer, because it or one in front is trained; shape (L,).

        A stage whose last layer has none computes nothing again, whatever the plan says, nor does such a layer by
        itself. Where no layer has gradients, the profile says nothing of them.
        """
        trained = np.cumsum(self.gradients + self.state.idle) > 0
        return trained if trained[-1] else np.ones_like(trained)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.names)


def sums_before(per_layer: FloatArray) -> FloatArray:
    """Sums over the layers in front of each layer, and over all of them; shape (L+1,)."""
    sums: FloatArray = np.concatenate([[0.0], np.cumsum(per_layer)])
    return sums
