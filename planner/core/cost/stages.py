"""Memory of many stages of a chain at once: sums and maxima over the layers of each stage.

A table has one row per first layer of a stage, and one column per last layer or per number of layers.
`planner.core.cost.allocations` divides the bytes of stages into allocations, and `planner.core.cost.peak_points`
counts the allocations at each point in the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.chain_costs import (
    ALWAYS,
    ChainCosts,
    StageMemoryModel,
    prefix_sums,
    profile_field_of,
    suffix_sums,
)
from planner.core.cost.layer_memory import SavedAndPeaks, cast_gradient_peaks, recomputed_backward_peaks
from planner.core.cost.passing import NoRelayedTensors, RelayedTensors
from planner.core.cost.waiting import Backward
from planner.core.cost.weight_backward import weight_backward_peaks
from planner.core.values.plan import Item

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePeaks:
    """Peak memory of one micro-batch while it runs on a stage, in bytes, for many stages.

    Other micro-batches, received input and transfer buffers are not included.
    """

    forward: FloatArray
    no_grad: FloatArray
    """Highest memory in a forward without gradients, which will be recomputed."""
    first_backward: FloatArray
    """Highest memory in the first micro-batch's backward, including the parameter gradients."""
    first_recomputed: FloatArray
    """Highest memory in the first micro-batch's backward, after the stage has recomputed its activations."""
    backward: FloatArray
    """Highest memory in the backward of any micro-batch except the first."""
    first_message: FloatArray
    """Highest memory while gradients are sent to other replicas, if the first micro-batch is the only one."""
    message: FloatArray
    """Highest memory while gradients are sent to other replicas, if a step has several micro-batches."""
    transient: FloatArray
    """Highest temporary memory of any action; used if `ChainCosts.exact` is false."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitBackwardMemory:
    """Memory of many stages with a split backward: an input-gradient pass, and later a weight-gradient pass."""

    held: FloatArray
    """Bytes that a micro-batch stores from its input-gradient pass to its weight-gradient pass."""
    gradients: FloatArray
    """Bytes of the parameter gradients that are created in the input-gradient pass."""
    first_input: FloatArray
    """Highest memory in the first micro-batch's input-gradient pass, including `gradients` and the stage's output."""
    input: FloatArray
    """Highest memory in the input-gradient pass of any micro-batch except the first, including the stage's output."""
    first_weight: FloatArray
    """Highest memory in the first micro-batch's weight-gradient pass, including gradients that this pass creates."""
    weight: FloatArray
    """Highest memory in the weight-gradient pass of any micro-batch except the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemoryTable:
    """Memory of many stages, in bytes.

    Each row is for one first layer. Each column is for one last layer, or for one number of layers. The argument
    `lasts` of `stage_memory_table` determines which of the two.

    If all rows or all columns of an array are equal, the array may have only one row or column. Entries whose last
    layer is before the first layer are undefined.
    """

    micro_batches: int
    """Number of micro-batches per step (M)."""
    exact: bool
    shape: tuple[int, int]
    always: Mapping[Item, FloatArray]
    """Bytes of the memory components that exist during the whole step (`ALWAYS`), by component."""
    gradients: FloatArray
    optimizer_peak: FloatArray
    casts: FloatArray
    rewritten: FloatArray
    renewed: FloatArray
    """Bytes of tensors that a forward stores in module attributes. They exist as long as the forward's activations."""
    data: FloatArray
    """Bytes of the mini-batch's inputs and targets that the stage reads."""
    input: FloatArray
    """Bytes received for one micro-batch; 0 for stage 0, which reads slices of the mini-batch."""
    copied_input: FloatArray
    output: FloatArray
    own_output: FloatArray
    """Bytes of the output without tensors that the stage receives and sends on unchanged."""
    sent_output: FloatArray
    """Bytes of the output that is sent to the next stage for one micro-batch; 0 for the last stage."""
    output_gradient: FloatArray
    """Bytes of the gradient received for one micro-batch; 0 if no layer up to the stage's end is trained."""
    input_gradient: FloatArray
    """Bytes of the gradient that is sent to the previous stage for one micro-batch."""
    saved: FloatArray
    """Bytes saved by one micro-batch between its forward and its backward, without the received input."""
    forward_only: BoolArray
    """True if no layer up to the stage's end is trained: the stage has no backward and recomputes nothing."""
    peaks: StagePeaks
    message: FloatArray
    """Copies of gradients while they are sent to other replicas; 0 without such copies."""
    memory_model: StageMemoryModel | None
    """Memory model from a package outside `core`; None if the memory model of this package applies."""
    split_backward: SplitBackwardMemory | None
    """Memory with a split backward; None if not requested."""
    recomputes_layers: bool = False
    """True if the table is a result of `with_recomputed_layers`."""


def stage_memory_table(
    costs: ChainCosts, firsts: IntArray, lasts: slice | int, *, micro_batches: int, splits_backward: bool = False
) -> StageMemoryTable:
    """Return the memory of all stages that begin with one of `firsts` and end with one of `lasts`.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        firsts: First layers.
        lasts: Last layers; or a number n, for stages of 1 to n layers, if the chain has no skip connections and no
            shared parameters.
        micro_batches: Number of micro-batches.
        splits_backward: True to include the memory with a split backward; only if `lasts` is a slice.

    Complexity: O(number of stages).
    """
    builder = StageMemoryTableBuilder(costs, firsts, lasts)
    stages = builder.table(micro_batches)
    return replace(stages, split_backward=builder.split_backward(stages)) if splits_backward else stages


def with_recomputed_layers(stages: StageMemoryTable, memory: SavedAndPeaks[Any]) -> StageMemoryTable:
    """Return a copy of `stages` with the saved bytes and peaks in `memory`, for stages that recompute single layers."""

    def of_all(size: FloatArray | float) -> FloatArray:
        return np.full(stages.shape, size)

    first_backward, backward = of_all(memory.first_backward), of_all(memory.backward)
    peaks = replace(
        stages.peaks,
        forward=of_all(memory.forward),
        first_backward=first_backward,
        first_message=first_backward,
        backward=backward,
        message=backward,
        transient=backward,
    )
    split_backward = stages.split_backward
    if split_backward is not None:
        # Upper bound of both passes: all bytes at once.
        between = np.rint(split_backward.held)
        split_backward = replace(
            split_backward, held=between, first_input=first_backward + between, input=backward + between
        )
    return replace(
        _map_arrays(stages, _whole),
        saved=of_all(memory.saved),
        copied_input=np.zeros((1, 1)),  # `memory` includes the copy of the input
        peaks=peaks,
        memory_model=_map_arrays(stages.memory_model, _whole),
        split_backward=split_backward,
        recomputes_layers=True,
    )


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    return np.rint(array) if array.dtype == np.float64 else array


def _map_arrays(record: _Record, change: Callable[[NDArray[Any]], NDArray[Any]]) -> _Record:
    """Return a copy of a record with `change` applied to each array; None stays None."""
    if record is None:
        return record
    whole: Any = record
    changed: dict[str, Any] = {}
    for field in fields(whole):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            changed[field.name] = change(value)
        elif isinstance(value, Mapping):
            changed[field.name] = {name: change(array) for name, array in value.items()}
    return cast("_Record", replace(whole, **changed))


class StageMemoryTableBuilder:
    """Builder of a `StageMemoryTable`: sums and maxima over the layers of each stage."""

    def __init__(self, costs: ChainCosts, firsts: IntArray, columns: slice | int) -> None:
        self.costs = costs
        self.firsts = firsts
        self.first = firsts[:, None]
        self.passing: RelayedTensors | NoRelayedTensors
        if isinstance(columns, int):
            # Entries of stages that would end after the chain are meaningless.
            self.last = np.minimum(self.first + np.arange(columns), costs.num_layers - 1)
            self.columns = self.last
            self.passing = NoRelayedTensors(self.first, self.last)
        else:
            self.columns = np.arange(costs.num_layers)[columns]
            self.last = self.columns[None, :]
            self.passing = RelayedTensors(costs, firsts, self.columns)
        self.saved_before = prefix_sums(costs.memory.saved)[firsts][:, None]

    def table(self, micro_batches: int) -> StageMemoryTable:
        costs, passing = self.costs, self.passing
        state, edge, shape = costs.state, costs.boundaries, (len(self.firsts), self.last.shape[1])
        is_last = self.last == costs.num_layers - 1
        output = np.broadcast_to(edge.output[self.last], shape)
        copied_input = edge.copied_input[self.firsts][:, None]
        received = np.where(self.firsts > 0, edge.input[self.firsts], 0.0)[:, None]
        unsaved = edge.unsaved_output[self.last]
        forward_only = np.broadcast_to(~costs.has_backward[self.last], shape)
        crossing = np.where(is_last, 0.0, output)
        gets_gradient = ~(forward_only | is_last)
        sends_gradient = costs.has_backward[self.firsts - 1] & (self.firsts > 0)
        saved = self.sums(costs.memory.saved) + unsaved - passing.unkept + copied_input
        # Replicas sum zeros for parameters without a gradient.
        gradients = self._sums_with_ties(costs.gradients, "gradients") + self.sums(
            costs.state.idle * (costs.bucket_bytes > 0)
        )
        always = {item: self._sums_with_ties(getattr(state, item), item) for item in ALWAYS}
        always["buffers"] = always["buffers"] + self.sums(costs.memory.attributes)
        batch = np.where(self.first == 0, edge.input[0], 0.0) + np.where(is_last, costs.target, 0.0)
        return StageMemoryTable(
            micro_batches=micro_batches,
            exact=costs.exact,
            shape=shape,
            always=always,
            gradients=gradients,
            optimizer_peak=self._optimizer_peak(),
            casts=self._sums_with_ties(state.casts, "casts"),
            rewritten=self.sums(state.rewritten),
            renewed=self.sums(costs.memory.renewed),
            # The first stage reads slices of the mini-batch, which the caller of the engine stores for the whole step.
            data=micro_batches * batch,
            input=received,
            copied_input=copied_input,
            output=output,
            own_output=output - passing.all,
            # Tensors that share a storage are sent one by one. Their storage exists once, as part of the saved bytes.
            sent_output=np.where(passing.all > 0, crossing, np.minimum(crossing, saved)),
            output_gradient=np.where(gets_gradient, edge.output_gradient[self.last], 0.0),
            input_gradient=np.where(sends_gradient, edge.input_gradient[self.firsts], 0.0)[:, None],
            saved=saved,
            forward_only=forward_only,
            peaks=self._peaks(output, gradients) if costs.exact else self._transients(),
            message=np.minimum(costs.bucket_bytes, gradients) if costs.bucket_bytes else np.zeros((1, 1)),
            memory_model=None if costs.memory_model is None else costs.memory_model.in_stages(self, micro_batches),
            split_backward=None,
        )

    def split_backward(self, stages: StageMemoryTable) -> SplitBackwardMemory:
        """Return the memory of the stages with a split backward."""
        costs, split_backward = self.costs, self.costs.split_backward
        by_input = np.maximum(costs.gradients - split_backward.weight_gradients, 0.0)
        # If it was not measured, assume that all saved tensors and the received input are kept.
        held = stages.input + stages.saved if costs.is_split_backward_assumed else self.sums(split_backward.held)
        if not costs.exact:
            transient = stages.peaks.transient
            none = np.zeros((1, 1))
            return SplitBackwardMemory(
                held=held,
                gradients=none,
                first_input=transient,
                input=transient,
                first_weight=transient,
                weight=transient,
            )
        above: FloatArray = stages.output - suffix_sums(split_backward.held)[self.last]

        def highest_input(level: FloatArray, end_level: FloatArray) -> FloatArray:
            # Gradients of shared parameters wait in W, not in I.
            return self._highest_backward(level, level - end_level) + above

        assert isinstance(self.passing, RelayedTensors)
        first_weight, weight = weight_backward_peaks(self, self.passing)
        return SplitBackwardMemory(
            held=held,
            gradients=self.sums(by_input),
            first_input=highest_input(split_backward.first_input, split_backward.end_first_input)
            - suffix_sums(by_input)[self.last],
            input=highest_input(split_backward.input, split_backward.end_input),
            first_weight=first_weight,
            weight=weight,
        )

    def sums(self, per_layer: FloatArray) -> FloatArray:
        """Return, for each stage, the sum of `per_layer` over its layers; shape (1, 1) if all values are 0."""
        if not per_layer.any():
            return np.zeros((1, 1))
        through = prefix_sums(per_layer)
        between: FloatArray = through[1:][self.last] - through[self.firsts][:, None]
        return between

    def highest(self, per_layer: FloatArray) -> FloatArray:
        """Return each stage's maximum of `per_layer`, which has the shape (layers,) or (first layers, layers)."""
        running: FloatArray = np.maximum.accumulate(np.where(self.last >= self.first, per_layer, 0.0), axis=1)
        return running

    def _highest_backward(
        self, peaks: FloatArray, output_bytes: FloatArray, which: Backward | None = None
    ) -> FloatArray:
        return self.passing.peak_backward(peaks[self.columns], output_bytes[self.columns], which) - self.saved_before

    def _sums_with_ties(self, per_layer: FloatArray, component: str) -> FloatArray:
        total = self.sums(per_layer)
        for tie in self.costs.ties:
            holds_both = (self.first <= tie.first) & (self.last >= tie.second)
            total = total - np.where(holds_both, getattr(tie, profile_field_of(component), 0.0), 0.0)
        return total

    def _optimizer_peak(self) -> FloatArray:
        state = self.costs.state
        if self.costs.optimizer_peaks_add:
            return self.sums(state.optimizer_peak)
        boundary = np.where(self.last > self.first, state.optimizer_boundary_peak[self.columns], 0.0)
        return self.highest(np.maximum(state.optimizer_peak[self.columns], boundary))

    def _peaks(self, output: FloatArray, gradients: FloatArray) -> StagePeaks:
        costs, levels, edge, columns = self.costs, self.costs.memory, self.costs.boundaries, self.columns
        passing, casts = self.passing, self.costs.state.casts
        # Received tensors count as the stage's input, even if a later layer of the stage reads them.
        unkept = passing.received_input_bytes(passing.unkept, edge.unsaved_input[columns])
        alive = passing.received_input_bytes(passing.all, edge.input_alive[columns])
        backward = self._highest_backward(levels.backward, levels.output_in_backward, "later")
        backward = backward - suffix_sums(casts)[self.last] + output
        first_backward = self._highest_backward(levels.first_backward, levels.output_in_first_backward, "first")
        first_backward = first_recomputed = first_backward - suffix_sums(costs.gradients)[self.last] + output
        if casts.any():
            backward, first_recomputed = self._with_gradients_of_casts(backward, first_backward, output)
        first_message, message = self._message_peaks(first_backward, backward, gradients, output)
        return StagePeaks(
            forward=self.highest(levels.forward[columns] - unkept) - self.saved_before,
            no_grad=self.highest(levels.no_grad[columns] - alive),
            first_backward=first_backward,
            first_recomputed=first_recomputed,
            backward=backward,
            first_message=first_message,
            message=message,
            transient=backward,
        )

    def _transients(self) -> StagePeaks:
        levels, columns = self.costs.memory, self.columns
        forward, backward = self.highest(levels.forward[columns]), self.highest(levels.backward[columns])
        return StagePeaks(
            forward=forward,
            no_grad=forward,
            first_backward=backward,
            first_recomputed=backward,
            backward=backward,
            first_message=backward,
            message=backward,
            transient=np.maximum(forward, backward),
        )

    def _with_gradients_of_casts(
        self, backward: FloatArray, first_backward: FloatArray, output: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        # Gradients of low-precision weight copies exist until the backward ends. Autograd then converts them to
        # gradients of parameters, which are twice as large. In a first backward without recomputation, autograd
        # converts each gradient at once.
        costs, levels, columns = self.costs, self.costs.memory, self.columns
        waiting = self.highest(cast_gradient_peaks(costs)[columns])
        casts = self._sums_with_ties(costs.state.casts, "casts")
        own_output = output - self.passing.all
        at_end = np.where(casts > 0, waiting + casts + own_output, 0.0)
        # In a recomputed first backward, they wait as well, and gradients of parameters without a copy exist at once.
        level, through = recomputed_backward_peaks(costs)
        highest = self._highest_backward(level, levels.output_in_backward) - through[-1] + through[self.last] + output
        gradients = self._sums_with_ties(costs.gradients, "gradients")
        recomputed = np.maximum(highest, gradients + waiting / 2 + own_output)
        return np.maximum(backward, at_end), np.minimum(first_backward, recomputed)

    def _message_peaks(
        self, first_backward: FloatArray, backward: FloatArray, gradients: FloatArray, output: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        # A stage whose gradients fit into one message sends them during the backward of its first trained layer. For
        # other stages, and under autocast, the result is an upper bound: the peak of the whole backward.
        costs, levels = self.costs, self.costs.memory
        if not costs.bucket_bytes or costs.state.casts.any():
            return first_backward, backward
        trained = np.flatnonzero(costs.gradients > 0)
        at = np.append(trained, costs.num_layers - 1)[np.searchsorted(trained, self.firsts)]
        first = (
            levels.first_backward[at][:, None] - self.saved_before - suffix_sums(costs.gradients)[self.last] + output
        )
        later = levels.backward[at][:, None] - self.saved_before + output
        for tie in costs.ties:
            waits = (at[:, None] == tie.first) & (self.last >= tie.second)
            later = later + np.where(waits, tie.gradient_bytes, 0.0)
        is_one = gradients <= costs.bucket_bytes
        return (
            np.where(is_one, np.minimum(first_backward, first), first_backward),
            np.where(is_one, np.minimum(backward, later), backward),
        )
