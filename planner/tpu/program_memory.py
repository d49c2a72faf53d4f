"""Peak memory of a plan that is one JAX program for all devices of a mesh (`planner.tpu.mesh_program`).

Every device runs the same code on arrays of the same shapes. For each memory component, a device needs as much as the
stage with most of this component. Every device also stores the whole mini-batch. Parameters, optimizer state, buffers
and the mini-batch exist during the whole step. The rest of the peak is the larger of

    forward     M * (I + S) + invariant + (I + S) + I + 1.1 * F
    backward    M * (I + S) + invariant + G + (I + S) + 2 * I + 1.1 * B

    M            number of micro-batches
    I            bytes that a stage receives per micro-batch
    S            bytes that a stage keeps per micro-batch
    G            bytes of a stage's gradients, which are accumulated in place
    F, B         bytes of the results and temporaries of a stage's forward and backward
    invariant    bytes of arrays that the compiler creates before the loops, such as 16-bit copies of all weights

I, S, G, F and B are the largest values of any stage. A stage is a branch of a conditional, which has its own arrays for
results. The terms were read from the compiler's assignment of buffers (jax 0.10.2, libtpu 0.0.52):

    M * (I + S)    arrays that the forwards of all micro-batches receive and keep
    I + S          copy for one micro-batch: a forward creates arrays before they are stored, a backward reads a copy
    I, 2 * I       sent and received tensors, which exist at the same time
    1.1            gaps between arrays of different sizes, in addition to gaps in a stage (`planner.tpu.stage_memory`)

Stages with arrays of different shapes waste memory (`planner.tpu.slots`). Measured errors are in
docs/measurements/tpu-composition.md.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.memory import single_stage_memory_table, stage_memory
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import stage_peak_points
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE
from planner.core.values.plan import Recompute, StageMemory
from planner.core.values.profile import ArrayKind, ProgramMemory
from planner.tpu.slots import shared_slots
from planner.tpu.stage_memory import CompiledLayerMemory, CompiledStageMemory

_GAPS = 1.1
"""Multiplier of the memory of a stage's forward or backward. It adds the gaps that arrays of different sizes leave in a
program of all stages."""

_TAKEN_OUT = 1 / 2
"""Share of the kept arrays that also exist outside the vectors of `planner.tpu.slots` at a backward's peak, as observed
on ConvNeXt."""

_RESHAPED = 1 / 2
"""Share of the flattened arrays that also exist in their original shapes at the peak, as observed on U-Nets."""

_NARROW_MARGIN = 1 / 2
"""Share of the kept arrays' bytes that is added to a forward if any kept array has a 16-bit type; observed on a ViT."""

_NARROW: Final = ("bfloat16", "float16")

_KEEPING: Final = ("never", "layers")
"""Recompute choices that keep more of a micro-batch than the received input."""


def program_memory(costs: ChainCosts, partition: Partition) -> StageMemory:
    """Return the memory of every device by component, in bytes, without the device's memory reserve.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        partition: Cuts and recompute choices, with GPipe's schedule and one stage per device. `except-last` counts as
            `always`, because the program recomputes all micro-batches alike.

    Raises:
        UsageError: The profile does not record the memory of layers in one compiled program.
    """
    memory = costs.memory_model
    if not isinstance(memory, CompiledLayerMemory) or not memory.programs:
        raise UsageError(
            "the profile does not record the memory that layers need in one compiled program",
            hint="profile for a TPU, which need not be attached: `gpipe-plan profile MODEL --device tpu:v2`",
        )
    micro_batches = partition.micro_batches
    choices = ["always" if choice == "except-last" else choice for choice in partition.recompute]
    intervals = partition.intervals()
    if len(intervals) == 1:  # without a conditional, there are no arrays for its results
        return stage_memory(
            costs,
            *intervals[0],
            stage_peak_points(GPIPE, micro_batches=micro_batches),
            recompute=choices[0],
            recomputed=partition.recomputed_in(0),
        )
    stages = [
        _program_parts(
            costs,
            first,
            end,
            micro_batches=micro_batches,
            recompute=choices[k],
            recomputed=partition.recomputed_in(k),
        )
        for k, (first, end) in enumerate(intervals)
    ]
    most = _with_slot_padding(memory.programs, intervals, _ProgramParts(*map(max, zip(*stages, strict=True))), choices)
    forward = most.input + most.kept + most.input + _GAPS * most.forward
    backward = most.gradients + most.input + most.kept + 2 * most.input + _GAPS * most.backward
    gradients = most.gradients if backward > forward else 0.0
    return StageMemory.of(
        parameters=round(most.parameters),
        gradients=round(gradients),
        optimizer=round(most.optimizer),
        buffers=round(most.buffers),
        in_flight=round(micro_batches * (most.input + most.kept) + sum(stage.data for stage in stages)),
        transfer=round(2 * most.input),
        working=round(most.copies + most.batch + max(forward, backward) - gradients - 2 * most.input),
    )


class _ProgramParts(NamedTuple):
    """Memory of one stage in bytes, if all stages run as branches of one program."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    data: float
    """Bytes of the mini-batch's inputs and targets that this stage reads."""
    input: float
    """Bytes of the input that the stage receives for one micro-batch."""
    kept: float
    """Bytes of the arrays kept for the backward of one micro-batch."""
    copies: float
    """Bytes of padding, and of 16-bit copies of weights for matmuls; both exist during the whole step."""
    batch: float
    """Bytes of a copy of the mini-batch, in 16 bits if matmuls read it. It exists during the whole step."""
    forward: float
    """Bytes of results and temporaries of a forward."""
    backward: float
    """Bytes of results and temporaries of a backward, including a recomputed forward."""


def _with_slot_padding(
    layers: Sequence[ProgramMemory],
    intervals: Sequence[tuple[int, int]],
    most: _ProgramParts,
    choices: Sequence[Recompute],
) -> _ProgramParts:
    # `most` has the largest bytes of any stage for each component. The result also has the memory that slots waste.
    keeping = [interval for interval, choice in zip(intervals, choices, strict=True) if choice in _KEEPING]
    state = shared_slots([_chained(layer.trained for layer in layers[first:end]) for first, end in intervals])
    kept = shared_slots([_chained(layer.kept for layer in layers[first:end]) for first, end in keeping])
    received = shared_slots([layers[first].received for first, _ in intervals[1:]])
    is_narrow = any(array.kind.startswith(_NARROW) for layer in layers for array in layer.kept)
    # With vectors, the stage's unpacked arrays exist as well, and its gradients before they are concatenated.
    taken_out = most.parameters if state.are_vectors else 0.0
    kept_out = _TAKEN_OUT * most.kept if kept.are_vectors else 0.0
    return most._replace(
        parameters=state.ratio * most.parameters,
        gradients=state.ratio * most.gradients,
        optimizer=state.ratio * most.optimizer,
        input=received.ratio * most.input,
        kept=kept.ratio * most.kept,
        copies=state.ratio * most.copies,
        forward=most.forward + taken_out + (_NARROW_MARGIN * most.kept if is_narrow else 0.0),
        backward=most.backward + 3 * taken_out + kept_out,
    )


def _chained(arrays: Iterable[Sequence[ArrayKind]]) -> list[ArrayKind]:
    return list(chain.from_iterable(arrays))


def _program_parts(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
) -> _ProgramParts:
    s, _ = single_stage_memory_table(
        costs, first, end, micro_batches=micro_batches, recompute=recompute, recomputed=recomputed
    )
    assert isinstance(costs.memory_model, CompiledLayerMemory)
    assert isinstance(s.memory_model, CompiledStageMemory)
    programs, stage, keeps = costs.memory_model, slice(first, end), recompute in _KEEPING
    nothing = np.zeros_like(s.saved)
    kept = s.saved if keeps else nothing
    # The whole mini-batch has the layout of the first layer, in 16 bits if the layer's matmuls read it.
    is_narrowed = programs.narrowed_input[stage].any()
    batch = nothing + micro_batches * programs.laid_out[stage].sum() / (2 if is_narrowed else 1)
    copies = nothing + programs.narrowed[stage].sum() + programs.padding[stage].sum()
    forward, backward = s.peaks.forward, s.peaks.backward
    if recompute == "never":
        at_once = _RESHAPED * programs.reshaped[stage]
        forward = nothing + (costs.memory.forward[stage] + at_once).max()
        backward = nothing + (costs.memory.backward[stage] - programs.reshaped[stage] + at_once).max()
    elif not keeps:
        backward = s.memory_model.peak_without_loop
    running = kept + forward, backward
    always = s.always["parameters"], s.gradients, s.always["optimizer"], s.always["buffers"], s.data
    sizes = (*always, s.input, kept, copies, batch, *running)
    return _ProgramParts(*(float(size[0, -1]) for size in sizes))
