"""Peak memory of a plan that is one program for all devices of a mesh (`planner.tpu.mesh_program`).

Every device runs the same code on arrays of the same shapes: of everything it holds as much as the stage that has most
of it, and the whole mini-batch, whichever stage reads it. Beside what is there from begin to end there is one of

    forward     M * (I + S) + invariant + (I + S) + I + 1.1 * largest forward of a stage
    backward    M * (I + S) + invariant + G + (I + S) + 2 * I + 1.1 * largest backward of a stage

with I what a stage receives and S what it keeps of a micro-batch, each the largest of any stage, G the gradients, and
`invariant` what the compiler makes once before the loops, weights of all places in 16 bits among it. A stage is a
branch of a conditional, which has arrays of its own for its results: what a forward keeps is made, is a result, and is
put into its place among M; a backward is given it from there. What is received is there beside what is sent. Gradients
are added to in place. Read from the compiler's assignment of buffers (jax 0.10.2, libtpu 0.0.52), but for the tenth on
top, which stands for gaps between arrays of unlike sizes, beside those that one piece has
(`planner.tpu.stage_memory`).

Arrays of shapes that no stage has all of take up to half more than the largest stage's, and stages with nothing in
common lie in vectors without padding (`planner.tpu.places`).
How near it comes: docs/measurements/tpu-composition.md.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.memory import one_stage, stage_memory
from planner.core.cost.moments import stage_moments
from planner.core.cost.partition import Partition
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE
from planner.core.values.plan import Recompute, StageMemory
from planner.core.values.profile import ArrayKind
from planner.tpu.places import shared_places
from planner.tpu.stage_memory import Looped, ProgramArrays, Programs

_GAPS = 1.1
"""Memory of a forward or backward over what its layers add up to."""

_TAKEN_OUT = 1 / 2
"""The part of what is kept in vectors that is there by itself at a backward's highest moment, as found on ConvNeXt."""

_RESHAPED = 1 / 2
"""The part of what a layer has in its own shape, and loops in rows, that is there at once: found on U-Nets."""

_WIDENED = 1 / 2
"""A margin for what a forward makes in 16 bits, as a part of it: found on a ViT, whose program took that much more."""

_NARROW: Final = ("bfloat16", "float16")

_KEEPING: Final = ("never", "layers")
"""Recompute choices that keep more of a micro-batch than what a stage receives."""


def program_memory(costs: ChainCosts, partition: Partition) -> StageMemory:
    """What every device needs, itemised at the higher moment, in bytes; the reserve left out.

    Args:
        costs: The chain at the plan's micro-batch size.
        partition: GPipe's schedule, one stage per device. `except-last` counts as `always`, as the program has it.

    Raises:
        UsageError: The profile does not record what layers need in one compiled program.

    Complexity: O(L).
    """
    programs = costs.law
    if not isinstance(programs, Programs) or not programs.arrays:
        raise UsageError(
            "the profile does not record what layers need in one compiled program",
            hint="profile for a TPU, which need not be here: `gpipe-plan profile MODEL --device tpu:v2`",
        )
    micro_batches = partition.micro_batches
    choices = ["always" if choice == "except-last" else choice for choice in partition.recompute]
    intervals = partition.intervals()
    if len(intervals) == 1:  # there is nothing to choose, and no array of results
        return stage_memory(
            costs,
            *intervals[0],
            stage_moments(GPIPE, micro_batches=micro_batches),
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
    most = _with_room(programs.arrays, intervals, _ProgramParts(*map(max, zip(*stages, strict=True))), choices)
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
    """What a stage brings into a program that several stages share, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    data: float
    """The part of the mini-batch that this stage reads."""
    input: float
    """Received per micro-batch."""
    kept: float
    """Per micro-batch, in the arrays of the loops."""
    copies: float
    """Made before the loops: weights as products take them, and padding."""
    batch: float
    """Made before the loops: the mini-batch as products take it."""
    forward: float
    """What a forward makes, and its temporaries."""
    backward: float
    """While a backward runs, a forward again included."""


def _with_room(
    layers: Sequence[ProgramArrays],
    intervals: Sequence[tuple[int, int]],
    most: _ProgramParts,
    choices: Sequence[Recompute],
) -> _ProgramParts:
    """The most of everything, with room for arrays of shapes that no stage has all of."""
    keeping = [interval for interval, choice in zip(intervals, choices, strict=True) if choice in _KEEPING]
    state = shared_places([_chained(layer.trained for layer in layers[first:end]) for first, end in intervals])
    kept = shared_places([_chained(layer.kept for layer in layers[first:end]) for first, end in keeping])
    received = shared_places([layers[first].received for first, _ in intervals[1:]])
    is_narrow = any(array.kind.startswith(_NARROW) for layer in layers for array in layer.kept)
    # Out of vectors a stage takes its arrays, and its gradients are put together to one.
    taken_out = most.parameters if state.are_vectors else 0.0
    kept_out = _TAKEN_OUT * most.kept if kept.are_vectors else 0.0
    return most._replace(
        parameters=state.share * most.parameters,
        gradients=state.share * most.gradients,
        optimizer=state.share * most.optimizer,
        input=received.share * most.input,
        kept=kept.share * most.kept,
        copies=state.share * most.copies,
        forward=most.forward + taken_out + (_WIDENED * most.kept if is_narrow else 0.0),
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
    s, _ = one_stage(costs, first, end, micro_batches=micro_batches, recompute=recompute, recomputed=recomputed)
    assert isinstance(costs.law, Programs)
    assert isinstance(s.law, Looped)
    programs, stage, keeps = costs.law, slice(first, end), recompute in _KEEPING
    nothing = np.zeros_like(s.saved)
    kept = s.saved if keeps else nothing
    # All of the mini-batch lies as the first layer wants it, in 16 bits where its products read it so.
    is_narrowed = programs.narrowed_input[stage].any()
    batch = nothing + micro_batches * programs.laid_out[stage].sum() / (2 if is_narrowed else 1)
    copies = nothing + programs.narrowed[stage].sum() + programs.padding[stage].sum()
    forward, backward = s.peaks.forward, s.peaks.backward
    if recompute == "never":
        at_once = _RESHAPED * programs.reshaped[stage]
        forward = nothing + (costs.levels.forward[stage] + at_once).max()
        backward = nothing + (costs.levels.backward[stage] - programs.reshaped[stage] + at_once).max()
    elif not keeps:
        backward = s.law.straight
    running = kept + forward, backward
    always = s.always["parameters"], s.gradients, s.always["optimizer"], s.always["buffers"], s.data
    sizes = (*always, s.input, kept, copies, batch, *running)
    return _ProgramParts(*(float(size[0, -1]) for size in sizes))
