"""Peak memory of a device that runs several chunks of the chain in turn (interleaved schedules).

Each chunk is a stage, and needs so many bytes of every part in `planner.core.cost.memory.ChunkParts`: what is always
there, what a micro-batch between its forward and its backward holds, what a forward or a backward needs while it runs,
and so on. How many of every part are there at once follows from the schedule, transfers included, instruction by
instruction:

    bytes during an instruction = sum over chunks of (always + sum over parts of count * part)

and the device's peak is the largest of these, or the moment of the optimizer's step.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.costs import ChainCosts
from planner.core.cost.memory import CHUNK_PARTS, chunk_parts, stage_memory
from planner.core.schedule import Action, Instruction, programs
from planner.core.values.plan import Recompute, StageMemory

__all__ = [
    "ChunkMemory",
    "Counts",
    "SharedBytes",
    "chunk_memory",
    "counts_of",
    "device_memory",
    "device_peaks",
    "held_once",
    "moments_of",
    "shared_bytes",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_PLACE = {part: place for place, part in enumerate(CHUNK_PARTS)}
_RUNNING = ("forward", "last_forward", "first_backward", "backward", "last_backward")


class ChunkMemory(NamedTuple):
    """What one chunk needs, in bytes."""

    always: StageMemory
    """What is there whatever runs."""
    parts: FloatArray
    """Of each of `CHUNK_PARTS`."""

    def part(self, name: str) -> float:
        """One of them."""
        return float(self.parts[_PLACE[name]])

    def without(self, shared: "SharedBytes", *, exact: bool) -> "ChunkMemory":
        """What is left of it; `shared` is of this stage alone, shape (1, 1). See `held_once`."""
        _, parts = held_once(np.zeros((1, 1)), self.parts[None, None], shared, exact=exact)
        left = dict(self.always.items())
        for name in ("parameters", "optimizer") if exact else ("parameters", "optimizer", "gradients"):
            left[name] -= round(getattr(shared, name).item())
        return ChunkMemory(StageMemory.of(**left), parts[0, 0])


class SharedBytes(NamedTuple):
    """Of parameters that chunks of one device share, what counts in a later one of them: arrays of shape (N, S)."""

    parameters: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    casts: FloatArray


class Counts(NamedTuple):
    """How many of every part are on a device: arrays of shape (actions, V, parts)."""

    during: IntArray
    """While an action runs."""
    after: IntArray
    """Until the next one runs."""


def counts_of(actions: Sequence[Sequence[Action]]) -> tuple[Counts, ...]:
    """What is there during and after every forward and backward of each device of an interleaved pipeline."""
    chunks = 1 + max(action.chunk for row in actions for action in row)
    last = max(action.micro_batch for action in actions[0])
    return tuple(_counts(row, chunks, last) for row in programs(actions))


def _counts(row: Sequence[Instruction], chunks: int, last: int) -> Counts:
    now = np.zeros((chunks, len(CHUNK_PARTS)), np.int64)
    now[:, _PLACE["casts"]] = 1
    during, after = [], []
    for what in row:
        mine = now[what.chunk]
        match what.do, what.kind:
            case "receive", "F":
                mine[_PLACE["input"]] += 1
            case "receive", "B":
                mine[_PLACE["output_gradient"]] += 1
            case "send", "B":
                # With it goes the one before.
                now[:, _PLACE["input_gradient"]] = 0
                mine[_PLACE["input_gradient"]] = 1
            case "run", _:
                running = _begin(mine, what, last)
                mine[_PLACE[running]] = 1
                during.append(now.copy())
                mine[_PLACE[running]] = 0
                _end(mine, what, last)
                after.append(now.copy())
    return Counts(np.array(during), np.array(after))


def _begin(mine: IntArray, what: Instruction, last: int) -> str:
    """Takes off what the running micro-batch brings along; which part it is while it runs."""
    is_last = what.micro_batch == last
    if what.kind == "F":
        _take_one(mine, "input")
        return "last_forward" if is_last else "forward"
    _take_one(mine, "output_gradient")
    mine[_PLACE["held"]] -= 1
    mine[_PLACE["kept"]] -= is_last
    if not mine[_PLACE["gradients"]]:
        return "first_backward"
    return "last_backward" if is_last else "backward"


def _take_one(mine: IntArray, part: str) -> None:
    # The first stage receives no input, the last one no gradient, and what stays on the device is in no buffer.
    mine[_PLACE[part]] = max(0, mine[_PLACE[part]] - 1)


def _end(mine: IntArray, what: Instruction, last: int) -> None:
    if what.kind == "F":
        mine[_PLACE["held"]] += 1
        mine[_PLACE["kept"]] += what.micro_batch == last
    else:
        mine[_PLACE["gradients"]] = 1


@lru_cache(maxsize=1024)
def moments_of(actions: tuple[tuple[Action, ...], ...]) -> tuple[IntArray, ...]:
    """Of each device the counts that can be its peak: shape (moments, V, parts), the optimizer's step included.

    Those are left out in which others have as much of everything.
    """
    return tuple(
        _undominated(np.concatenate([counts.during, _optimizer_steps(counts)])) for counts in counts_of(actions)
    )


def _optimizer_steps(counts: Counts) -> IntArray:
    """One for each chunk's part of the step, of which the largest counts; autocast is left by then."""
    chunks = counts.during.shape[1]
    steps = np.zeros((chunks, *counts.during.shape[1:]), np.int64)
    steps[:, :, _PLACE["gradients"]] = 1
    steps[np.arange(chunks), np.arange(chunks), _PLACE["optimizer_step"]] = 1
    return steps


def _undominated(counts: IntArray) -> IntArray:
    flat = np.unique(counts.reshape(len(counts), -1), axis=0)
    # Sorted, so that only a later one can have as much of everything.
    kept = [n for n, one in enumerate(flat) if not (flat[n + 1 :] >= one).all(axis=1).any()]
    return flat[kept].reshape(len(kept), *counts.shape[1:])


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
    found = chunk_parts(
        costs,
        np.array([first]),
        end,
        micro_batches=micro_batches,
        recompute=recompute,
        recomputed=recomputed,
    )
    always, *parts = (float(part[0, -1]) for part in found)
    stage = stage_memory(costs, first, end, micro_batches=micro_batches, in_flight=1, recompute="never")
    static = StageMemory.of(parameters=stage.parameters, optimizer=stage.optimizer, buffers=stage.buffers)
    data = round(micro_batches * ((costs.input[0] if first == 0 else 0.0) + _targets(costs, end)))
    gradients = round(always) - static.total - data
    items = dict(static.items()) | {"gradients": gradients, "in_flight": data}
    return ChunkMemory(StageMemory.of(**items), np.array(parts))


def shared_bytes(costs: ChainCosts, cuts: IntArray, num_devices: int) -> SharedBytes:
    """Whole bytes to take off each of S stages, in N ways to cut the chain.

    Gradients are made by the later chunk, whose backward is the first.

    Args:
        costs: The chain.
        cuts: First layer of every stage, and the number of layers; shape (N, S+1).
        num_devices: K: stage s is on device s % K.
    """
    found = np.zeros((len(SharedBytes._fields), len(cuts), cuts.shape[1] - 1))
    rows = np.arange(len(cuts))
    for tie in costs.ties:
        if not tie.these_alone:
            continue
        sizes = np.rint([tie.parameter_bytes, tie.gradient_bytes, tie.optimizer_bytes, tie.cast_bytes])
        second = (cuts[:, 1:-1] <= tie.second).sum(axis=1)
        unfound = np.ones(len(cuts), bool)
        for layer in (tie.first, *reversed(tie.earlier)):  # the nearest on the same device; in one stage it is counted
            first = (cuts[:, 1:-1] <= layer).sum(axis=1)
            same_device = unfound & ((second - first) % num_devices == 0)
            shares = same_device & (first != second)
            found[:, rows[shares], first[shares]] += sizes[:, None]
            unfound &= ~same_device
    return SharedBytes(*found)


def held_once(
    always: FloatArray, parts: FloatArray, shared: SharedBytes, *, exact: bool
) -> tuple[FloatArray, FloatArray]:
    """What stages need (shape (N, S), and of each of `CHUNK_PARTS`: (N, S, parts)), `shared` taken off.

    Without exact records gradients are always there.
    """
    parts = parts.copy()
    parts[..., _PLACE["casts"]] -= shared.casts
    if exact:
        parts[..., _PLACE["gradients"]] -= shared.gradients
    return always - shared.parameters - shared.optimizer - (0.0 if exact else shared.gradients), parts


def _targets(costs: ChainCosts, end: int) -> float:
    return float(costs.target) if end == costs.num_layers else 0.0


def device_peaks(always: FloatArray, parts: FloatArray, *, moments: IntArray) -> FloatArray:
    """Peak of N devices with V chunks each, in bytes; shape (N,).

    Args:
        always: Shape (N, V).
        parts: Of each of `CHUNK_PARTS`: shape (N, V, parts).
        moments: Of the device, as `moments_of` gives them.
    """
    alive = parts.reshape(len(parts), -1) @ moments.reshape(len(moments), -1).T
    peaks: FloatArray = always.sum(axis=1) + alive.max(axis=1)
    return peaks


def device_memory(chunks: Sequence[ChunkMemory], moments: IntArray, reserve_bytes: int = 0) -> tuple[StageMemory, ...]:
    """Each chunk's part of the device's peak, whose total is their sum; the reserve is counted in the first.

    Args:
        chunks: Of the device.
        moments: Of the device, as `moments_of` gives them.
        reserve_bytes: Of the device.
    """
    parts = np.stack([chunk.parts for chunk in chunks])
    peak = moments[int((moments * parts).sum(axis=(1, 2)).argmax())]
    return tuple(
        _itemised(chunk, dict(zip(CHUNK_PARTS, count.tolist(), strict=True)), reserve_bytes if v == 0 else 0)
        for v, (chunk, count) in enumerate(zip(chunks, peak, strict=True))
    )


def _itemised(chunk: ChunkMemory, count: dict[str, int], reserve_bytes: int) -> StageMemory:
    there = {part: round(number * chunk.part(part)) for part, number in count.items()}
    running = sum(there[part] for part in _RUNNING)
    # Of the micro-batch that runs, what it would hold if it waited counts as in flight.
    waiting = min(round(chunk.part("held")), running)
    received = 0
    if any(count[part] for part in _RUNNING[2:]):
        received = min(round(chunk.part("output_gradient")), running - waiting)
    always = chunk.always
    return StageMemory.of(
        parameters=always.parameters,
        gradients=always.gradients + there["gradients"],
        optimizer=always.optimizer,
        buffers=always.buffers,
        casts=there["casts"],
        in_flight=always.in_flight + there["held"] + there["kept"] + there["input"] + waiting,
        transfer=there["output_gradient"] + there["input_gradient"] + received,
        working=running - waiting - received + there["optimizer_step"],
        reserve=reserve_bytes,
    )
