"""Peak memory of a plan that is one program for all devices of a mesh (`planner.executor.jax.pipeline`).

Every device runs the same code on arrays of the same shapes: of everything it holds as much as the stage that has most
of it, and the whole mini-batch, whichever stage reads it. Beside what is there from begin to end there is one of

    forward     M * (I + S) + invariant + (I + S) + I + largest forward of a stage
    backward    M * (I + S) + invariant + G + (I + S) + 2 * I + 1.1 * largest backward of a stage

with I what a stage receives and S what it keeps of a micro-batch, each the largest of any stage, G the gradients, and
`invariant` what the compiler makes once before the loops. A stage is a branch of a conditional, which has arrays of its
own for its results: what a forward keeps is made, is a result, and is put into its place among M; a backward is given
it from there. What is received is there beside what is sent. Gradients are added to in place. Read from the compiler's
assignment of buffers (jax 0.10.2, libtpu 0.0.52), but for the tenth of a backward, which stands for gaps between arrays
of unlike sizes.

Not known here, since a profile has sizes and no shapes: arrays of shapes that no stage has all of take up to half more
(`planner.executor.jax.pipeline.Packing`), and stages with nothing in common lie in vectors without padding, which is
less. How near it comes: docs/measurements/tpu-composition.md.
"""

from planner.core.cost.costs import ChainCosts
from planner.core.cost.evaluate import Partition
from planner.core.cost.memory import ProgramParts, program_parts, stage_memory
from planner.core.values.plan import StageMemory

__all__ = ["program_memory"]

_GAPS = 1.1
"""Memory of a backward over what its layers add up to."""


def program_memory(costs: ChainCosts, partition: Partition) -> StageMemory:
    """What every device needs, itemised at the higher moment, in bytes; the reserve left out.

    Args:
        costs: The chain at the plan's micro-batch size.
        partition: GPipe's schedule, one stage per device. `except-last` counts as `always`, as the program has it.

    Complexity: O(L).
    """
    micro_batches = partition.micro_batches
    choices = ["always" if choice == "except-last" else choice for choice in partition.recompute]
    intervals = partition.intervals()
    if len(intervals) == 1:  # there is nothing to choose, and no array of results
        return stage_memory(
            costs,
            *intervals[0],
            micro_batches=micro_batches,
            in_flight=micro_batches,
            recompute=choices[0],
            recomputed=partition.recomputed_in(0),
        )
    stages = [
        program_parts(
            costs,
            first,
            end,
            micro_batches=micro_batches,
            recompute=choices[k],
            recomputed=partition.recomputed_in(k),
        )
        for k, (first, end) in enumerate(intervals)
    ]
    most = ProgramParts(*map(max, zip(*stages, strict=True)))
    forward = most.input + most.kept + most.input + most.forward
    backward = most.gradients + most.input + most.kept + 2 * most.input + _GAPS * most.backward
    gradients = most.gradients if backward > forward else 0.0
    return StageMemory.of(
        parameters=round(most.parameters),
        gradients=round(gradients),
        optimizer=round(most.optimizer),
        buffers=round(most.buffers),
        in_flight=round(micro_batches * (most.input + most.kept) + sum(stage.data for stage in stages)),
        transfer=round(2 * most.input),
        working=round(most.invariant + max(forward, backward) - gradients - 2 * most.input),
    )
