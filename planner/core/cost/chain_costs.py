"""Costs of the layers of a chain at one micro-batch size: input of the time and memory models.

Arrays have shape (L,) unless stated otherwise. Times are in microseconds, sizes in bytes of one micro-batch.
Records of arrays have no equality (`eq=False`), since arrays do not compare as a whole.

    boundary i        layer i         boundary i + 1
    ----------->  [ saved, peaks ]  ----------->
    input[i]                         output[i]           forward
    input_gradient[i]                output_gradient[i]  backward

A level is the highest memory of a micro-batch while a layer runs. It includes what earlier layers have saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.workload import Workload
from planner.core.values.plan import Recompute
from planner.core.values.profile import LayerProfile

if TYPE_CHECKING:
    from planner.core.cost.parts import Parts
    from planner.core.cost.stages import Stages, Window

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BUCKET_BYTES = 4 * 2**20
"""Approximate size in bytes of a message with small gradients to other replicas; larger gradients need no copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Shared parameters of layers `first` < `second`; a stage that has both layers stores these bytes once."""

    first: int
    second: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    cast_bytes: float = 0.0
    these_alone: bool = True
    """True if these two layers share these bytes regardless of the layers between them."""
    earlier: tuple[int, ...] = ()
    """Layers before `first` that share the same bytes."""


ALWAYS: Final = ("parameters", "optimizer", "buffers")
"""Components of memory that exist during the whole step: fields of `State` and of a plan's `StageMemory`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """State of a layer that does not depend on the micro-batch; `bytes_field` names the fields of `LayerProfile`."""

    parameters: FloatArray
    idle: FloatArray
    """Bytes of trained parameters that never get a gradient."""
    optimizer: FloatArray
    optimizer_peak: FloatArray
    """Transient bytes of the optimizer's step."""
    optimizer_boundary_peak: FloatArray
    """Transient bytes of that step between the previous layer of the same stage and this one."""
    buffers: FloatArray
    rewritten: FloatArray
    """Bytes of state that the forward writes; recomputation needs a copy of its previous value for each micro-batch."""
    casts: FloatArray
    """Autocast weight cache, from the first forward of a step to its last backward."""

    @classmethod
    def of(cls, layers: Sequence[LayerProfile]) -> "State":
        """Return the state of each layer."""
        names = {each.name: bytes_field(each.name) for each in fields(cls)}
        return cls(**{name: np.array([getattr(layer, of) for layer in layers], float) for name, of in names.items()})

    @property
    def always(self) -> FloatArray:
        """Bytes that exist during the whole step."""
        always: FloatArray = np.sum([getattr(self, name) for name in ALWAYS], axis=0)
        return always


def bytes_field(component: str) -> str:
    """Return the field that has a component's bytes: `cast_bytes` for `casts`."""
    return f"{component.removesuffix('s')}_bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boundaries:
    """Transfers over the boundaries before and after each layer."""

    input: FloatArray
    """Bytes that cross the boundary before each layer; for layer 0, the model's input."""
    output: FloatArray
    input_gradient: FloatArray
    """Gradients of those tensors in `input` that have one."""
    output_gradient: FloatArray
    unsaved_output: FloatArray
    """Part of `output` that is not in `Levels.saved`; a stage that ends here stores it in addition."""
    unkept_input: FloatArray
    """Part of `input` that no layer saves; `Levels.forward` includes it."""
    input_alive: FloatArray
    """Part of `input` that `Levels.no_grad` includes."""
    copied_input: FloatArray
    """Bytes that a stage that begins here copies, since its layers write into the received input."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """Memory that a micro-batch saves in each layer, and the highest memory while the layer runs.

    A level is relative to the memory before this micro-batch, for a stage that begins at layer 0. Subtract
    `saved[:i].sum()` for a stage that begins at layer i. Without exact records, levels are transients above all saved
    memory.
    """

    saved: FloatArray
    internal: FloatArray
    """Part of `saved` that never leaves the layer."""
    forward: FloatArray
    no_grad: FloatArray
    """Highest level of a forward without gradients; it includes the input, except the stage's own."""
    first_backward: FloatArray
    """Highest level of the first micro-batch's backward, including the parameter gradients that it allocates."""
    backward: FloatArray
    """Highest level of a later backward, without parameter gradients, with those of `State.casts` of later layers."""
    end_twice_first: FloatArray
    """Part of `first_backward` that is counted twice if a stage ends with the layer.

    It is also in the executor's output or its gradient. Of tensors from earlier layers, only gradients count.
    """
    end_twice: FloatArray
    """Part of `backward` that is counted twice if a stage ends with the layer."""
    attributes: FloatArray
    """Tensors in plain attributes, which exist during the whole step."""
    renewed: FloatArray
    """Part of `attributes` that exists once for each waiting micro-batch that keeps its activations."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halves:
    """Split backward: I computes input gradients, W the deferred weight gradients.

    Levels are as in `Levels`. Those of I include what later layers keep for W, those of W what earlier layers keep.
    """

    input_us: FloatArray
    weight_us: FloatArray
    held: FloatArray
    """Bytes kept between I and W."""
    weight_gradients: FloatArray
    """Part of `ChainCosts.gradients` that W computes."""
    first_input: FloatArray
    """Highest level of the first micro-batch's I, including the gradients that it computes."""
    input: FloatArray
    """Highest level of a later I."""
    end_first_input: FloatArray
    """Highest level of the first I if a stage ends with the layer, without its output and output gradient."""
    end_input: FloatArray
    """Highest level of a later I if a stage ends with the layer, without its output and output gradient."""
    first_weight: FloatArray
    """Highest level of the first W, including the gradients that it computes."""
    weight: FloatArray
    """Highest level of a later W, including gradients of `State.casts` of later layers."""


class StageLaw(Protocol):
    """Records of stages with a separate memory model; arrays have the shape of a window."""

    def parts(self, s: "Stages", recompute: Recompute, *, in_flight: int) -> "Parts":
        """Return the memory components of the stages; arguments as for `planner.core.cost.parts.parts_of`."""
        ...


class LayerLaw(Protocol):
    """Records of layers with a separate memory model: a frozen dataclass of arrays."""

    def in_stages(self, window: "Window", micro_batches: int) -> StageLaw:
        """Return the records of the stages of a window."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storages:
    """Storages that cross boundaries; arrays of shape (storages,).

    Every output tensor of a layer has an entry. It has 0 bytes if the tensor shares the storage of another one.
    """

    maker: IntArray
    """Layer that makes the storage; -1 for the model's input."""
    until: IntArray
    """Last layer that receives the storage; L for the model's output."""
    kept_by_readers: FloatArray
    """Bytes if a receiving layer saves the storage, else 0."""
    kept_by_maker: FloatArray
    """Bytes if only the layer that makes the storage saves it, else 0."""
    kept_by_nobody: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relays:
    """Gradients that consecutive layers forward unchanged; arrays of shape (relays,)."""

    first: IntArray
    """First of these layers."""
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
    """True if the optimizer updates all parameters at once, so that its transients add up."""
    ties: tuple[Tie, ...]
    gradients: FloatArray
    """Parameter gradients that the first micro-batch's backward allocates."""
    boundaries: Boundaries
    target: float
    """Bytes that the loss reads in addition to the output, such as targets."""
    levels: Levels
    composed_halves: Callable[[], Halves]
    """Function that computes `halves` on first use, since few schedules need them."""
    halves_assumed: bool
    """True if `halves` was not measured. Then I and W take half of the backward each, and W keeps all saved tensors."""
    exact: bool
    """True if levels come from exact records; else they are the additive bound of the two transient peaks."""
    law: LayerLaw | None
    """Records of layers with a separate memory model; None for the two models of this package."""
    storages: Storages
    relays: Relays
    workload: Workload
    bucket_bytes: float = 0.0
    """Largest copy of gradients in a message to other replicas, in bytes; 0 without replicas."""

    def of_replicas(self, replicas: int) -> "ChainCosts":
        """Return the costs for one of `replicas` data-parallel pipelines."""
        return replace(self, bucket_bytes=float(BUCKET_BYTES) if replicas > 1 else 0.0)

    @property
    def halves(self) -> Halves:
        """Costs of the split backward."""
        return self.composed_halves()

    @property
    def has_backward(self) -> NDArray[np.bool_]:
        """Mask of layers with a backward, since they or earlier layers are trained; shape (L,).

        Layers without a backward, and stages that end with one, are never recomputed. If no layer has gradients, the
        profile has no information about training, and all layers have a backward.
        """
        trained = np.cumsum(self.gradients + self.state.idle) > 0
        return trained if trained[-1] else np.ones_like(trained)

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return len(self.names)


def sums_before(per_layer: FloatArray) -> FloatArray:
    """Return the sums over the layers before each layer, and over all layers; shape (L+1,)."""
    sums: FloatArray = np.concatenate([[0.0], np.cumsum(per_layer)])
    return sums
