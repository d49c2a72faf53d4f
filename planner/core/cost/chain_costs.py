"""Costs of the layers of a chain at one micro-batch size: input of the time and memory models.

Arrays have one entry per layer unless stated otherwise. Times are in microseconds, sizes in bytes of one micro-batch.
Classes with arrays have no equality (`eq=False`), because `==` on arrays returns an array.

    boundary i        layer i         boundary i + 1
    ----------->  [ saved, peaks ]  ----------->
    input[i]                         output[i]           forward
    input_gradient[i]                output_gradient[i]  backward
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.workload import SampleWork
from planner.core.values.plan import Recompute
from planner.core.values.profile import LayerProfile

if TYPE_CHECKING:
    from planner.core.cost.allocations import MemoryByAllocation
    from planner.core.cost.stages import StageMemoryTable, StageMemoryTableBuilder


BUCKET_BYTES = 4 * 2**20
"""Largest size in bytes of a bucket of several gradients, which are copied into it and sent to other replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameters:
    """Parameters that two layers share, `first` < `second`. A stage with both layers stores their bytes once."""

    first: int
    second: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    optimizer_us: float = 0.0
    """Time of the optimizer's step for these parameters."""
    cast_bytes: float = 0.0
    sum_bytes: float = 0.0
    """Bytes of the largest tensor that autograd allocates to sum both layers' gradients; 0 if it adds in place."""
    converted_bytes: float = 0.0
    """Gradient bytes of shared parameters for which layer `second` uses low-precision copies (autocast)."""
    is_pair_known: bool = True
    """False if the profile does not say which earlier layers share these bytes."""
    earlier: tuple[int, ...] = ()
    """Further layers that share these parameters, all before layer `first`, ascending."""


ALWAYS: Final = ("parameters", "optimizer", "buffers")
"""Components of memory that exist during the whole step: fields of `FixedLayerBytes` and of a plan's `StageMemory`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedLayerBytes:
    """Memory of each layer that does not depend on the micro-batch size, in bytes, such as parameters and buffers."""

    parameters: FloatArray
    idle: FloatArray
    """Bytes of trained parameters that never get a gradient."""
    optimizer: FloatArray
    optimizer_peak: FloatArray
    """Transient bytes while the optimizer updates the layer's parameters."""
    optimizer_boundary_peak: FloatArray
    """Transient bytes when the optimizer has updated the previous layer and begins with this layer."""
    buffers: FloatArray
    rewritten: FloatArray
    """Bytes of state that the forward writes; recomputation needs a copy of the old state for each micro-batch."""
    casts: FloatArray
    """Bytes of the autocast weight cache, which exists from the first forward of a step to the last backward."""

    @classmethod
    def of(cls, layers: Sequence[LayerProfile]) -> "FixedLayerBytes":
        names = {each.name: profile_field_of(each.name) for each in fields(cls)}
        return cls(**{name: np.array([getattr(layer, of) for layer in layers], float) for name, of in names.items()})

    @property
    def always(self) -> FloatArray:
        """Bytes of each layer that exist during the whole step: the sum of the components in `ALWAYS`."""
        always: FloatArray = np.sum([getattr(self, name) for name in ALWAYS], axis=0)
        return always


def profile_field_of(component: str) -> str:
    """Return the field of `LayerProfile` with the bytes of a memory component: `cast_bytes` for `casts`."""
    return f"{component.removesuffix('s')}_bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundaryBytes:
    """Bytes that one micro-batch sends over the boundaries before (`input`) and after (`output`) each layer."""

    input: FloatArray
    """Bytes that cross the boundary before each layer; for layer 0, the model's input."""
    output: FloatArray
    input_gradient: FloatArray
    """Bytes of the gradient of the input; tensors without a gradient do not count."""
    output_gradient: FloatArray
    unsaved_output: FloatArray
    """Part of the output that no layer saves for backward."""
    unsaved_input: FloatArray
    """Part of the input that no layer saves for backward; 0 if `ChainCosts.exact` is false."""
    input_alive: FloatArray
    """Part of the input that is in memory at the peak of a forward without gradients."""
    copied_input: FloatArray
    """Bytes of the input that a stage copies if it begins with the layer; 0 if no layer writes into this input."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMemory:
    """Bytes that one micro-batch saves in each layer, and peak memory while each layer runs.

    If `ChainCosts.exact` is true, all peaks except `no_grad` include `saved` of all earlier layers of the chain.
    For the peaks of a stage, `StageMemoryTableBuilder` subtracts `saved` of the layers before the stage.
    """

    saved: FloatArray
    internal: FloatArray
    """Part of `saved` that no other layer creates or receives."""
    forward: FloatArray
    no_grad: FloatArray
    """Highest memory of a forward without gradients. The layer's input is included, except for layer 0."""
    first_backward: FloatArray
    """Highest memory of the first micro-batch's backward, including parameter gradients of this and later layers."""
    backward: FloatArray
    """Highest memory of the backward of any micro-batch except the first, without parameter gradients."""
    output_in_first_backward: FloatArray
    """Bytes of the layer's output and of the output's gradient that `first_backward` includes."""
    output_in_backward: FloatArray
    """Bytes of the layer's output and of the output's gradient that `backward` includes."""
    attributes: FloatArray
    """Bytes of tensors in plain attributes of modules, which exist during the whole step."""
    renewed: FloatArray
    """Part of `attributes` that each micro-batch in flight stores for itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitBackwardCosts:
    """Time and memory of each layer's input-gradient pass (I) and weight-gradient pass (W).

    If `ChainCosts.exact` is true, a peak includes the bytes that other layers of the chain store at this time.
    """

    input_us: FloatArray
    weight_us: FloatArray
    held: FloatArray
    """Bytes that a layer stores between its input-gradient and its weight-gradient pass."""
    weight_gradients: FloatArray
    """Bytes of parameter gradients that the weight-gradient pass allocates, not the input-gradient pass."""
    first_input: FloatArray
    """Highest memory of the first micro-batch's input-gradient pass. Parameter gradients that it allocates count."""
    input: FloatArray
    """Highest memory of the input-gradient pass of any micro-batch except the first."""
    end_first_input: FloatArray
    """Value of `first_input` for a stage's last layer. The layer's output and the output's gradient do not count."""
    end_input: FloatArray
    """Value of `input` for a stage's last layer. The layer's output and the output's gradient do not count."""
    first_weight: FloatArray
    """Highest memory of the first micro-batch's weight-gradient pass. Parameter gradients that it allocates count."""
    weight: FloatArray
    """Highest memory of the weight-gradient pass of any micro-batch except the first."""


class StageMemoryModel(Protocol):
    """Memory model that a package outside `core` provides for stages, for example for compiled TPU layers.

    Arrays have one row per first layer of a stage and one column per last layer, as in `StageMemoryTable`.
    """

    def memory_by_allocation(
        self, stages: "StageMemoryTable", recompute: Recompute, *, in_flight: int
    ) -> "MemoryByAllocation":
        """Return the memory of each stage: permanent bytes, and the bytes of each kind of allocation.

        Args:
            stages: Stages, by first and last layer.
            recompute: Recompute choice of all these stages.
            in_flight: Largest number of micro-batches in flight on a stage.
        """
        ...


class LayerMemoryModel(Protocol):
    """Memory model that a package outside `core` provides for layers, for example for compiled TPU layers."""

    def in_stages(self, builder: "StageMemoryTableBuilder", micro_batches: int) -> StageMemoryModel:
        """Return the memory model of the stages that `builder` makes, for a number of micro-batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storages:
    """Tensor storages that cross boundaries between layers, including the model's input and output; one entry each."""

    maker: IntArray
    """Layer that makes the storage; -1 for the model's input."""
    until: IntArray
    """Last layer that receives the storage. For the model's output, this is the number of layers."""
    saved_by_readers: FloatArray
    """Bytes of the storage if any receiving layer saves it for backward, else 0."""
    saved_by_maker: FloatArray
    """Bytes of the storage if it is saved for backward, but only by the layer that makes it; else 0."""
    unsaved: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassedGradients:
    """Gradients that the layers `first` to `last` pass back unchanged; arrays have one entry per gradient."""

    first: IntArray
    last: IntArray
    bytes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainCosts:
    """Times and memory of all layers of a chain, for micro-batches of `micro_batch_size` samples."""

    micro_batch_size: int
    names: tuple[str, ...]
    forward_us: FloatArray
    backward_us: FloatArray
    entry_us: FloatArray
    """Entry time of each layer: if a stage begins with it, time until the layer starts in the stage's forward."""
    optimizer_us: FloatArray
    state: FixedLayerBytes
    optimizer_peaks_add: bool
    """True if the optimizer updates all parameters at once, so that transients of the layers add up."""
    ties: tuple[TiedParameters, ...]
    gradients: FloatArray
    """Bytes of parameter gradients that the first micro-batch's backward allocates."""
    boundaries: BoundaryBytes
    target: float
    """Bytes that the loss reads in addition to the output, such as targets."""
    memory: LayerMemory
    compute_split_backward: Callable[[], SplitBackwardCosts]
    """Function that computes `split_backward` on first use, because few schedules split backwards."""
    is_split_backward_assumed: bool
    """True if costs of split backwards are assumed, not measured."""
    exact: bool
    """True if `memory` is computed from a `MemoryDetail` of each layer; else `memory` is an upper bound."""
    memory_model: LayerMemoryModel | None
    """Memory model from a package outside `core`; None if the memory model of this package applies."""
    storages: Storages
    relays: PassedGradients
    workload: SampleWork
    bucket_bytes: float = 0.0
    """Size of the largest message with gradients to other replicas, in bytes; 0 with one replica."""

    def of_replicas(self, replicas: int) -> "ChainCosts":
        """Return the costs if the chain is trained by `replicas` data-parallel pipelines."""
        return replace(self, bucket_bytes=float(BUCKET_BYTES) if replicas > 1 else 0.0)

    @property
    def split_backward(self) -> SplitBackwardCosts:
        """Costs of split backwards."""
        return self.compute_split_backward()

    @property
    def has_backward(self) -> BoolArray:
        """True for each layer that has a backward: the layer or an earlier layer has trained parameters."""
        # A profile in which no layer has bytes of gradients does not say which layers are trained.
        trained = np.cumsum(self.gradients + self.state.idle) > 0
        return trained if trained[-1] else np.ones_like(trained)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.names)


def prefix_sums(per_layer: FloatArray) -> FloatArray:
    """Return the prefix sums of L values, shape (L + 1,): entry i is the sum over the layers before layer i."""
    sums: FloatArray = np.concatenate([[0.0], np.cumsum(per_layer)])
    return sums


def suffix_sums(per_layer: FloatArray) -> FloatArray:
    """Return the suffix sums of L values, shape (L,): entry i is the sum over all layers after layer i."""
    sums: FloatArray = per_layer.sum() - np.cumsum(per_layer)
    return sums
