"""Memory of stages whose layers were compiled for a TPU.

`planner.core.cost.costs` loads `compiled_costs` if the layers of a profile have the field `program`. Arrays have one
number per layer, or one per possible stage (first layer, last layer), as in `planner.core.cost.chain_costs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from planner.core.cost.allocations import (
    AllocationSize,
    MemoryByAllocation,
    build_memory_by_allocation,
    size_during_action,
)
from planner.core.cost.arrays import FloatArray
from planner.core.cost.chain_costs import prefix_sums
from planner.core.cost.layer_memory import BACKWARD, FORWARD
from planner.core.cost.peak_points import BACKWARDS, FORWARDS
from planner.core.cost.size_costs import ProfiledLayerCosts, cost_bounds_without_details
from planner.core.cost.stages import StageMemoryTable, StageMemoryTableBuilder
from planner.core.values.plan import Recompute
from planner.core.values.profile import LayerProfile, ProgramMemory

_GAPS: Final = 1.05
"""Factor for gaps between arrays of different sizes. Executables of single layers do not show these gaps. Without the
factor, predictions for recompute `always`, and for `never` with one micro-batch, were 0.92 to 1.06 times the memory of
programs that were compiled with `compiler_options_for` (docs/measurements/tpu-composition.md)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledLayerMemory:
    """Memory of each layer within one executable, in bytes.

    Sizes include the gaps, that is, the unused memory between arrays. Fields that exclude gaps say so.
    """

    carried: FloatArray
    """Bytes stored from a layer's forward to its backward."""
    level: FloatArray
    """Peak memory of the layer's forward and backward for one micro-batch, plus `carried` of all earlier layers."""
    narrowed: FloatArray
    """16-bit copies of weights for matmuls. They exist only if a step has several micro-batches."""
    narrowed_input: FloatArray
    """Bytes of a 16-bit copy of the model's input for one micro-batch; 0 for all layers except the first."""
    padding: FloatArray
    """Padding of parameters and gradients."""
    reshaped: FloatArray
    """Bytes, before flattening, of the saved arrays that a loop over micro-batches flattens. Excludes gaps."""
    waiting: FloatArray
    """Padding of saved activations, in bytes, until a loop over micro-batches flattens them. Excludes gaps."""
    laid_out: FloatArray
    """Bytes of a copy of the model's input for one micro-batch, in the first layer's layout; 0 for all other layers."""
    programs: tuple[ProgramMemory, ...]
    """Each layer's record at the profiled micro-batch size nearest to the plan's; empty if a record lists no arrays."""

    def in_stages(self, builder: StageMemoryTableBuilder, micro_batches: int) -> "CompiledStageMemory":
        """Return the memory of each stage, computed from the stage's layers. `builder` defines the possible stages."""
        carried_before = prefix_sums(self.carried)[builder.firsts][:, None]
        return CompiledStageMemory(
            peak_without_loop=builder.highest(self.level[builder.columns]) - carried_before,
            narrowed=builder.sums(self.narrowed) + micro_batches * builder.sums(self.narrowed_input),
            padding=builder.sums(self.padding) + builder.sums(self.laid_out),
            waiting=builder.sums(self.waiting),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledStageMemory:
    """Memory of stages that are compiled as one executable each, in bytes."""

    peak_without_loop: FloatArray
    """Highest temporary memory of an executable that runs the forward and backward of one micro-batch."""
    narrowed: FloatArray
    """16-bit copies of weights and of the mini-batch for matmuls."""
    padding: FloatArray
    """Padding of parameters and gradients, and a copy of the first layer's input in the layout that the layer needs."""
    waiting: FloatArray
    """Padding of saved activations until a loop over micro-batches flattens them."""

    def memory_by_allocation(
        self, stages: StageMemoryTable, recompute: Recompute, *, in_flight: int
    ) -> MemoryByAllocation:
        """Return the memory of stages by allocation, if each stage is compiled as one executable.

        Args:
            stages: Memory of the stages' tensors.
            recompute: Recompute choice of the stages.
            in_flight: Largest number of micro-batches in flight.
        """
        # Gradients exist during the whole step. A loop over micro-batches stores the activations of each micro-batch. A
        # forward creates its activations and then copies them into this memory, so they exist twice.
        kept_bytes, edges = stages.input + stages.saved, stages.input + stages.output
        keeps, loops = recompute in ("never", "layers"), in_flight > 1
        held = AllocationSize({"in_flight": kept_bytes if keeps else edges}, saved=int(keeps))
        around = self.padding + (self.narrowed if loops else 0.0)
        transfer = stages.sent_output + stages.input_gradient + stages.message
        if not keeps or not (loops or stages.recomputes_layers):
            forward = backward = size_during_action(
                stages.input if keeps else edges, self.peak_without_loop + around, transfer
            )
        else:
            # Copies of weights (`narrowed`) are not added: not all activations wait for a slot at the same time, and
            # the copies fit into the memory of the rest.
            making = stages.peaks.forward + self.padding + (stages.saved + self.waiting if loops else 0.0)
            forward = size_during_action(kept_bytes, making, stages.message, saved=1 + loops, peak=FORWARD)
            backward = size_during_action(kept_bytes, stages.peaks.backward + around, transfer, saved=1, peak=BACKWARD)
        kept = AllocationSize({"in_flight": np.maximum(kept_bytes, edges)}) if recompute == "except-last" else held
        running = {**dict.fromkeys(FORWARDS, forward), **dict.fromkeys(BACKWARDS, backward)}
        return build_memory_by_allocation(
            stages, recompute, waiting=held, last_waiting=kept, output_gradient=stages.sent_output, running=running
        )


def compiled_costs(layers: Sequence[LayerProfile], n: int) -> ProfiledLayerCosts:
    """Return the costs of layers that are compiled as one executable, at the n-th profiled micro-batch size."""
    plain, programs = cost_bounds_without_details(layers, n), [layer.program[n] for layer in layers]
    received = np.append(programs[0].input_bytes, plain.boundaries.input[1:])
    return replace(
        plain,
        boundaries=replace(plain.boundaries, input=received),
        memory_model=_layer_memory(programs, plain.memory.saved),
        target=float(programs[-1].target_bytes),
    )


def _layer_memory(programs: Sequence[ProgramMemory], saved: FloatArray) -> CompiledLayerMemory:
    def each(size: Callable[[ProgramMemory], float]) -> FloatArray:
        return _GAPS * np.array([size(program) for program in programs], dtype=float)

    carried = each(lambda program: program.carried_bytes)
    reshaped = np.array([program.reshaped_bytes for program in programs], dtype=float)
    return CompiledLayerMemory(
        carried=carried,
        level=prefix_sums(carried)[:-1] + each(lambda program: program.peak_bytes),
        narrowed=each(lambda program: program.narrowed_bytes),
        narrowed_input=each(lambda program: program.narrowed_input_bytes),
        padding=each(lambda program: 2 * program.padding_bytes),
        reshaped=reshaped,
        waiting=np.where(reshaped > 0, np.maximum(carried / _GAPS - saved, 0.0), 0.0),
        laid_out=each(lambda program: program.laid_out_bytes),
        programs=tuple(programs) if all(program.received for program in programs) else (),
    )
