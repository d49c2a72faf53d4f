"""Peak memory of a device that runs several chunks of the chain in turn (interleaved schedules).

Each chunk is a stage (`planner.core.memory`): it holds its parameters and the like all the time, `held` bytes for every
micro-batch of it in flight, `casts` bytes (autocast's copies of weights) until the last backward of the step, and
`working` bytes while one of its forwards or backwards runs. Which chunk has how many
micro-batches in flight at every action follows from the schedule, so the device's peak is

    max over its actions of   sum over chunks (always + casts + in flight · held)  +  working of the chunk that runs

or the moment of the optimizer's step. With one chunk that is the stage's own peak under 1F1B.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.costs import ChainCosts
from planner.core.memory import stage_memory
from planner.core.plan import Recompute, StageMemory
from planner.core.schedule import Action, in_flight_profile

__all__ = [
    "MANY",
    "ChunkMemory",
    "chunk_memory",
    "device_memory",
    "device_peaks",
    "mini_batch_bytes",
    "moments_of",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MANY = 1 << 20
"""Micro-batches in flight, so many that their memory decides when a stage's peak is."""


class ChunkMemory(NamedTuple):
    """What one chunk needs, in bytes."""

    always: StageMemory
    """What is there whatever runs; of `in_flight` what does not depend on how many micro-batches there are."""
    casts: float
    held: float
    """Per micro-batch in flight, the one that runs included."""
    transfer: float
    """While one runs, beside what is held."""
    working: float
    optimizer_step: float
    """Peak of the optimizer's step above parameters, gradients and its state."""


class Moments(NamedTuple):
    """The moments of a device's step that can hold its peak; arrays with a row per moment."""

    in_flight: IntArray
    """Shape (moments, V)."""
    running: IntArray
    """Shape (moments,): the chunk that runs."""


@lru_cache(maxsize=4096)
def moments_of(row: tuple[Action, ...], chunks: int) -> Moments:
    """The moments of one device's actions, those left out in which another has as much of everything."""
    seen = {(counts, action.chunk) for counts, action in zip(in_flight_profile(row, chunks), row, strict=True)}
    kept = [
        (counts, running)
        for counts, running in sorted(seen)
        if not any(
            other != counts and running == also and all(a <= b for a, b in zip(counts, other, strict=True))
            for other, also in seen
        )
    ]
    return Moments(np.array([counts for counts, _ in kept]), np.array([running for _, running in kept]))


def chunk_memory(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
) -> ChunkMemory:
    """Of the stage that runs layers `first`..`end - 1`; arguments as for `stage_memory`."""

    def at(in_flight: int) -> StageMemory:
        return stage_memory(
            costs,
            first,
            end,
            micro_batches=micro_batches,
            in_flight=in_flight,
            recompute=recompute,
            recomputed=recomputed,
        )

    many, more = at(MANY), at(MANY + 1)
    held = more.in_flight - many.in_flight
    data = round(mini_batch_bytes(costs, micro_batches, np.array(first), np.array(end)).item())
    # What the running micro-batch holds is counted as held and, where it is only being made, as working as well: what
    # is too much comes off its working. What is too little (`except-last` keeps one micro-batch) may be there always.
    rest = many.in_flight - MANY * held - data
    always = StageMemory.of(
        parameters=many.parameters,
        gradients=many.gradients,
        optimizer=many.optimizer,
        buffers=many.buffers,
        in_flight=data + max(0, rest),
    )
    transients = costs.optimizer_peak[first:end]
    step = float(transients.sum() if costs.optimizer_peaks_add else transients.max())
    return ChunkMemory(
        always, float(many.casts), float(held), float(many.transfer), float(many.working + min(0, rest)), step
    )


def mini_batch_bytes(costs: ChainCosts, micro_batches: int, first: IntArray, end: IntArray) -> FloatArray:
    """What stages at either end of the chain hold of the whole mini-batch: inputs, targets; in whole bytes."""
    inputs = np.where(first == 0, costs.input[0], 0.0)
    held: FloatArray = np.rint(micro_batches * (inputs + np.where(end == costs.num_layers, costs.target, 0.0)))
    return held


def device_peaks(
    always: FloatArray,
    casts: FloatArray,
    held: FloatArray,
    working: FloatArray,
    optimizer_steps: FloatArray,
    *,
    moments: Moments,
) -> FloatArray:
    """Peak of N devices with V chunks each; all arrays have shape (N, V), `working` with transfers included.

    Returns:
        Shape (N,), bytes.
    """
    alive = casts.sum(axis=1)[:, None] + held @ moments.in_flight.T + working[:, moments.running]
    peaks: FloatArray = always.sum(axis=1) + np.maximum(alive.max(axis=1), optimizer_steps.max(axis=1))
    return peaks


def device_memory(
    chunks: Sequence[ChunkMemory], row: Sequence[Action], reserve_bytes: int = 0
) -> tuple[StageMemory, ...]:
    """Each chunk's part of the device's peak, whose total is their sum; the reserve is counted in the first."""
    moments = moments_of(tuple(row), len(chunks))
    held = np.array([chunk.held for chunk in chunks])
    busy = np.array([chunk.transfer + chunk.working for chunk in chunks])
    alive = sum(chunk.casts for chunk in chunks) + moments.in_flight @ held + busy[moments.running]
    at = int(alive.argmax())
    steps = [chunk.optimizer_step for chunk in chunks]
    stepping = steps.index(max(steps))
    in_step = steps[stepping] > alive[at]
    parts = []
    for v, chunk in enumerate(chunks):
        runs = not in_step and v == moments.running[at]
        parts.append(
            StageMemory.of(
                parameters=chunk.always.parameters,
                gradients=chunk.always.gradients,
                optimizer=chunk.always.optimizer,
                buffers=chunk.always.buffers,
                casts=0 if in_step else round(chunk.casts),
                in_flight=chunk.always.in_flight + (0 if in_step else round(moments.in_flight[at, v] * chunk.held)),
                transfer=round(chunk.transfer) if runs else 0,
                working=round(chunk.working) if runs else round(steps[v]) if in_step and v == stepping else 0,
                reserve=reserve_bytes if v == 0 else 0,
            )
        )
    return tuple(parts)
