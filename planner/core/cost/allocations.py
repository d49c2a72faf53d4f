"""Compute the allocations of a stage, such as the activations of one micro-batch.

The letters are those of docs/cost-model.md, except R and T, which are `attr` and `cache` there. They are sizes, for
one micro-batch unless noted:

    I   received input (not the pass I)         G   gradients of the stage's parameters (per step)
    O   output                                  T   autocast weight cache (per step)
    O'  gradient of the output                  Z   gradients in one message to other replicas (per step)
    S   activations saved for the backward      f   peak of a forward
    R   tensors stored in module attributes     n   peak of a forward without gradients
    D   copy of the input                       b   peak of a backward; that of the first backward includes G
    J   copy of state that a forward changes

    A = I + S + R    micro-batch that waits with its activations
    E = I + O + J    micro-batch that waits to be recomputed

Each row is one allocation, for a stage that is neither the first nor the last, if each layer has a `MemoryDetail`:

                not recomputed          recomputed
    held        A                       E
    forward     I + D + f               I + D + J + n
    backward    I + D + b + O'          I + D + O + R + max(f + J, b) + O'
    message     I + D + b + O' + Z      I + D + O + b + O' + Z

In the row `message`, b is the peak while gradients are sent. A recomputation has ended by then.

The first backward and the last micro-batch have allocations of their own. Further allocations are G, T, I, O' and the
gradient of the received input. With a split backward, each pass has its own peaks, and a micro-batch stores the
allocation `weight_held` between the passes. `planner.core.cost.peak_points` counts the allocations at each point in
the step.

Without `MemoryDetail`, the sizes are an upper bound: the sum of all bytes that may exist. Compiled layers have a memory
model of their own (`planner.core.cost.chain_costs.LayerMemoryModel`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.layer_memory import BACKWARD, FIRST_BACKWARD, FORWARD
from planner.core.cost.peak_points import (
    ALLOCATIONS,
    BACKWARDS,
    FORWARDS,
    INPUT_BACKWARDS,
    WEIGHT_BACKWARDS,
    AllocationName,
    AllocationsAtPoint,
    PeakPoints,
)
from planner.core.cost.stages import SplitBackwardMemory, StageMemoryTable
from planner.core.values.plan import ITEMS, Item, Recompute


@dataclass(frozen=True, slots=True)
class AllocationSize:
    """Size of one allocation (one of `ALLOCATIONS`) in many stages.

    `saved` and `peak` are only used if stages recompute single layers.
    """

    items: Mapping[Item, FloatArray]
    """Bytes by memory component."""
    saved: int = 0
    """1 if the allocation includes the saved activations of its micro-batch, else 0."""
    peak: int | None = None
    """Index in `LayerPeaks` of the peak that the allocation includes; None if it includes no peak."""

    @property
    def total(self) -> FloatArray | float:
        """Bytes of the allocation, summed over the components."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByAllocation:
    """Memory of many stages: permanent bytes, and allocations that exist only at some points in the step."""

    always: Mapping[Item, FloatArray]
    sizes: Mapping[AllocationName, AllocationSize]
    """Size of each allocation; allocations of 0 bytes may be left out."""
    last_differs: bool
    """True if all micro-batches are recomputed, except the last one (`except-last`)."""

    def peak_points(self, points: PeakPoints) -> Iterator[AllocationsAtPoint]:
        """Yield the points in the step at which stages with this recompute choice can have their peak.

        Points at which gradients are sent to other replicas (`message`) are left out if messages take no memory.
        """
        for point in points.apart if self.last_differs else points.alike:
            if "message" in self.sizes or ("message", 1) not in point:
                yield point

    def at(self, point: AllocationsAtPoint) -> dict[Item, FloatArray]:
        """Return the memory of the stages at a point in the step, in bytes by component."""
        items = dict(self.always)
        for name, count in point:
            if name in self.sizes:
                for item, size in self.sizes[name].items.items():
                    more = size if count == 1 else count * size
                    items[item] = items[item] + more if item in items else more
        return items

    def one_stage_by_component(self) -> tuple[FloatArray, FloatArray]:
        """Return permanent bytes and allocations, by component, of the stage of a `single_stage_memory_table`.

        Returns:
            Permanent bytes, in the order of `ITEMS`; and the bytes of each allocation, one row for each of
            `ALLOCATIONS`, one column for each of `ITEMS`.
        """
        always, sizes = np.zeros(len(ITEMS)), np.zeros((len(ALLOCATIONS), len(ITEMS)))
        for item, size in self.always.items():
            always[ITEMS.index(item)] = size[0, -1]
        for name, allocation in self.sizes.items():
            for item, size in allocation.items.items():
                sizes[ALLOCATIONS.index(name), ITEMS.index(item)] = size[0, -1]
        return always, sizes

    def totals(self, shape: tuple[int, int]) -> FloatArray:
        """Return rounded bytes per stage: first an array of the permanent bytes, then one for each of `ALLOCATIONS`.

        `shape` is the shape of the `StageMemoryTable`. The result has the shape (1 + allocations, *shape).
        """
        always = sum(np.rint(size) for size in self.always.values())
        sizes = [np.rint(self.sizes[name].total) if name in self.sizes else 0.0 for name in ALLOCATIONS]
        return np.stack([np.broadcast_to(size, shape) for size in (always, *sizes)])


def stage_memory_by_allocation(stages: StageMemoryTable, recompute: Recompute, *, in_flight: int) -> MemoryByAllocation:
    """Return the memory of stages by allocation, if each stage has a device to itself.

    Args:
        stages: The stages; if `recompute` is `layers`, a result of `with_recomputed_layers`.
        recompute: Recompute choice of the stages.
        in_flight: Largest number of micro-batches in flight.
    """
    if stages.memory_model is not None:
        return stages.memory_model.memory_by_allocation(stages, _in_effect(stages, recompute), in_flight=in_flight)
    memory = memory_on_shared_device(stages, recompute)
    if stages.exact or "message" not in memory.sizes:
        return memory
    # Without a `MemoryDetail` of each layer this is an upper bound: a message may exist during every action.
    return replace(memory, sizes={**memory.sizes, **dict.fromkeys((*FORWARDS, *BACKWARDS), memory.sizes["message"])})


def memory_on_shared_device(stages: StageMemoryTable, recompute: Recompute) -> MemoryByAllocation:
    """Return the memory of stages by allocation, if stages share their device with other stages."""
    return (_exact if stages.exact else _additive)(stages, _in_effect(stages, recompute))


def _in_effect(stages: StageMemoryTable, recompute: Recompute) -> Recompute:
    # If there is one micro-batch, it is the last one.
    return "never" if recompute == "except-last" and stages.micro_batches == 1 else recompute


def _exact(s: StageMemoryTable, recompute: Recompute) -> MemoryByAllocation:
    I, O, S, D, J = s.input, s.own_output, s.saved, s.copied_input, s.rewritten
    R = s.renewed
    A, E = I + S + R, I + O + J
    gradient = s.output_gradient
    held, kept = AllocationSize({"in_flight": A}, saved=1), AllocationSize({"in_flight": A})
    forward = last_forward = size_during_action(I + D, s.peaks.forward, peak=FORWARD)
    first = _making_gradients(s, I + D, s.peaks.first_backward)
    backward = last_backward = size_during_action(I + D, s.peaks.backward, gradient, peak=BACKWARD)
    if recompute in ("except-last", "always"):
        held = AllocationSize({"in_flight": E})
        forward = size_during_action(I, s.peaks.no_grad + J + D)
        # Recomputation repeats the forward from the old state. The new output, which both peaks include, exists in
        # addition to the output that was sent.
        recomputing = s.peaks.forward + J
        # Meanwhile, attributes still hold tensors of the last forward, because recomputation does not change
        # attributes.
        first = _making_gradients(s, I + O, np.maximum(recomputing, s.peaks.first_recomputed) + R + D)
        backward = size_during_action(I + O, np.maximum(recomputing, s.peaks.backward) + R + D, gradient)
    if recompute == "except-last":
        last_forward = size_during_action(I, s.peaks.forward + D)
    else:
        kept, last_forward, last_backward = held, forward, backward
    running: dict[AllocationName, AllocationSize] = {
        "forward": forward,
        "last_forward": last_forward,
        "first_backward": first,
        "backward": backward,
        "last_backward": last_backward,
    }
    if s.split_backward is not None:
        running |= _exact_split_backward(s, s.split_backward, recompute)
    if s.message.any():
        # Recomputation is over when gradients are sent. Of its micro-batch, the output that was sent still exists.
        running["message"] = _message(s, I + O + D if recompute == "always" else I + D)
    return build_memory_by_allocation(
        s, recompute, waiting=held, last_waiting=kept, output_gradient=gradient, running=running
    )


def _exact_split_backward(
    s: StageMemoryTable, split_backward: SplitBackwardMemory, recompute: Recompute
) -> dict[AllocationName, AllocationSize]:
    I, O, D, J = s.input, s.own_output, s.copied_input, s.rewritten
    gradient = s.output_gradient
    first, every = split_backward.first_input, split_backward.input
    first_input = _making_gradients(s, I + D, first, most=split_backward.gradients)
    each_input = last_input = size_during_action(I + D, every, gradient, peak=BACKWARD)
    if recompute in ("except-last", "always"):
        recomputing = s.peaks.forward + J
        first_input = _making_gradients(s, I + O, np.maximum(recomputing, first) + D, most=split_backward.gradients)
        each_input = size_during_action(I + O, np.maximum(recomputing, every) + D, gradient)
        last_input = each_input if recompute == "always" else last_input
    made = s.gradients - split_backward.gradients
    first_weight = AllocationSize({"gradients": made, "working": np.maximum(split_backward.first_weight - made, 0.0)})
    each_weight = AllocationSize({"working": split_backward.weight})
    sizes: dict[AllocationName, AllocationSize] = {
        "weight_held": AllocationSize({"in_flight": split_backward.held}),
        "input_backward_gradients": AllocationSize({"gradients": split_backward.gradients}),
        "first_input_backward": first_input,
        "input_backward": each_input,
        "last_input_backward": last_input,
        "first_weight_backward": first_weight,
        "weight_backward": each_weight,
    }
    if s.message.any():
        # Gradients are sent after the last one is computed.
        last = first_weight if s.micro_batches == 1 else each_weight
        sizes["weight_message"] = replace(last, items={**last.items, "transfer": s.message})
    return sizes


def _making_gradients(
    s: StageMemoryTable, in_flight: FloatArray, peak: FloatArray, most: FloatArray | None = None
) -> AllocationSize:
    # Not all gradients exist at the peak of the first backward. At most `peak` bytes are listed as gradients.
    gradients = np.minimum(s.gradients if most is None else most, peak)
    size = size_during_action(in_flight, peak - gradients, s.output_gradient, peak=FIRST_BACKWARD)
    return replace(size, items={**size.items, "gradients": gradients})


def _message(s: StageMemoryTable, in_flight: FloatArray) -> AllocationSize:
    transfer = s.output_gradient + s.message
    if s.micro_batches > 1:
        return size_during_action(in_flight, s.peaks.message, transfer, peak=BACKWARD)
    first = _making_gradients(s, in_flight, s.peaks.first_message)
    return replace(first, items={**first.items, "transfer": transfer})


def _additive(s: StageMemoryTable, recompute: Recompute) -> MemoryByAllocation:
    A, E = s.input + s.saved, s.input + s.output + s.rewritten
    keeps = recompute in ("never", "layers")
    held = AllocationSize({"in_flight": A if keeps else E}, saved=int(keeps))
    # Gradients of autocast copies exist until the end of a backward.
    working = s.peaks.transient + s.casts + (0.0 if keeps else s.saved)
    transfer = s.sent_output + s.input_gradient
    every = size_during_action(held.items["in_flight"], working, transfer, saved=int(keeps), peak=BACKWARD)
    running = dict.fromkeys((*FORWARDS, *BACKWARDS), every)
    if s.message.any():
        running["message"] = replace(every, items={**every.items, "transfer": transfer + s.message})
    if s.split_backward is not None:
        between = s.split_backward.held
        running |= dict.fromkeys(
            INPUT_BACKWARDS,
            replace(every, items={**every.items, "in_flight": np.maximum(between, every.items["in_flight"])}),
        )
        running |= dict.fromkeys(WEIGHT_BACKWARDS, size_during_action(between, s.split_backward.weight + s.casts))
        running["weight_held"] = AllocationSize({"in_flight": between})
        if s.message.any():
            running["weight_message"] = size_during_action(between, s.split_backward.weight + s.casts, s.message)
    kept = AllocationSize({"in_flight": np.maximum(A, E)}) if recompute == "except-last" else held
    return build_memory_by_allocation(
        s, recompute, waiting=held, last_waiting=kept, output_gradient=s.sent_output, running=running
    )


def size_during_action(
    in_flight: FloatArray,
    working: FloatArray,
    transfer: FloatArray | None = None,
    *,
    saved: int = 0,
    peak: int | None = None,
) -> AllocationSize:
    """Return the size, in bytes of memory components, of an allocation that exists only while an action runs.

    Args:
        in_flight: Bytes of the component `in_flight`: the micro-batch's activations.
        working: Bytes of the component `working`: temporary tensors.
        transfer: Bytes of transfer buffers, if any.
        saved: 1 if `in_flight` includes the micro-batch's saved activations, else 0.
        peak: Index in `LayerPeaks` of the peak that `working` includes; None if it includes no peak.
    """
    items: dict[Item, FloatArray] = {"in_flight": in_flight, "working": working}
    return AllocationSize(items if transfer is None else {**items, "transfer": transfer}, saved, peak)


def build_memory_by_allocation(
    stages: StageMemoryTable,
    recompute: Recompute,
    *,
    waiting: AllocationSize,
    last_waiting: AllocationSize,
    output_gradient: FloatArray,
    running: Mapping[AllocationName, AllocationSize],
) -> MemoryByAllocation:
    """Return the memory of stages by allocation, from the allocations of waiting micro-batches and running actions.

    Args:
        stages: The stages.
        recompute: Recompute choice of the stages.
        waiting: Memory of a micro-batch between its forward and its backward.
        last_waiting: Memory of the last micro-batch between its forward and its backward.
        output_gradient: Bytes of a received gradient before its backward runs.
        running: Allocations that exist only while an action runs.
    """
    always: dict[Item, FloatArray] = {**stages.always, "in_flight": stages.data}
    sizes: dict[AllocationName, AllocationSize] = {
        "casts": AllocationSize({"casts": stages.casts}),
        "held": waiting,
        "kept": last_waiting,
        "input": AllocationSize({"in_flight": stages.input}),
        "output_gradient": AllocationSize({"transfer": output_gradient}),
        "input_gradient": AllocationSize({"transfer": stages.input_gradient}),
        **running,
        "optimizer_step": AllocationSize({"working": stages.optimizer_peak}),
    }
    # Only a `MemoryDetail` shows when gradients are allocated. Otherwise they are assumed to exist all the time.
    if stages.exact:
        sizes["gradients"] = AllocationSize({"gradients": stages.gradients})
    else:
        always["gradients"] = stages.gradients
    return MemoryByAllocation(always=always, sizes=sizes, last_differs=recompute == "except-last")
