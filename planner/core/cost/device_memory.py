"""Peak memory of a device that runs several chunks of the chain in turn (interleaved schedules).

Each chunk is a stage, with parts as any other has them (`planner.core.cost.parts`), and the law is that of
`planner.core.cost.memory`, summed over the chunks of the device; their counts follow from its program, transfers
included, instruction by instruction (`planner.core.cost.moments`). What differs:

- Every part is taken in whole bytes, so that what the chunks show in a plan adds up to the device's peak.
- Parameters that two chunks share are there once, and so is what one hands over to the next on the same device
  (`shared_bytes`, `held_once`).
- The law of compiled programs does not hold: such a profile counts as one without exact records.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import ManyLevels, StageLevels, least_levels
from planner.core.cost.memory import one_stage
from planner.core.cost.moments import FORWARDS, PARTS, RUNNING, WITH_BACKWARDS, PartName
from planner.core.cost.parts import Size, shared_parts_of
from planner.core.cost.stages import stages_in, with_layers_again
from planner.core.values.placement import Placement, device_of
from planner.core.values.plan import ITEMS, Item, Recompute, StageMemory

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MUCH: Final = 2.0**48
"""More bytes than anything holds, and few enough to be told apart to the last one when others are added."""

_PLACE: Final[Mapping[PartName, int]] = {part: place for place, part in enumerate(PARTS)}
_WITH_INPUT: Final[tuple[PartName, ...]] = ("held", "kept", *FORWARDS, *WITH_BACKWARDS)
"""The parts that have the received input of their micro-batch in them."""
_RUNNING: Final = [_PLACE[part] for part in RUNNING]
_ITEM_OF: Final[Mapping[PartName, Item]] = {
    **dict.fromkeys(("gradients", "input_backward_gradients"), "gradients"),
    "casts": "casts",
    **dict.fromkeys(("held", "kept", "weight_held", "input"), "in_flight"),
    **dict.fromkeys(("output_gradient", "input_gradient"), "transfer"),
    "optimizer_step": "working",
}
"""The item of every part that is not of an action that runs."""


class ChunkMemory(NamedTuple):
    """What one chunk needs, in bytes."""

    always: StageMemory
    """The bytes that are there whatever runs."""
    parts: FloatArray
    """Bytes of each of `PARTS`."""

    def part(self, name: PartName) -> float:
        """Bytes of one part."""
        return float(self.parts[_PLACE[name]])

    def without(self, shared: "SharedBytes", *, exact: bool) -> "ChunkMemory":
        """The chunk without what is `shared` with a later one: arrays of shape (1, 1). See `held_once`."""
        _, parts = held_once(np.zeros((1, 1)), self.parts[None, None], shared, exact=exact)
        left = dict(self.always.items())
        for name in ("parameters", "optimizer") if exact else ("parameters", "optimizer", "gradients"):
            left[name] -= round(getattr(shared, name).item())
        return ChunkMemory(StageMemory.of(**left), parts[0, 0])


class ChunkByLayers(NamedTuple):
    """A chunk that recomputes single layers, as it depends on which: each part is the larger of two lines.

    bytes of a part = max(least, rest + saved * S) + level
    """

    always: float
    """Bytes that are there whatever runs."""
    least: FloatArray
    """Shape (parts,), as the others."""
    rest: FloatArray
    saved: IntArray
    """How many S are in it."""
    level: IntArray
    """Position in `LayerPeaks` of the level that is in it; -1 where none is."""

    def parts(self, saved: FloatArray | float, levels: FloatArray) -> FloatArray:
        """Bytes of each of `PARTS`, shape (..., parts).

        Args:
            saved: S, shape (..., 1).
            levels: By position in `LayerPeaks`, and 0 in a last place; shape (..., 4).
        """
        parts: FloatArray = np.maximum(self.least, self.rest + self.saved * saved) + levels[..., self.level]
        return parts

    def without(self, shared: "SharedBytes", *, exact: bool) -> "ChunkByLayers":
        """The chunk without what is `shared` with another one: arrays of shape (1, 1). See `held_once`."""
        always, least = held_once(np.full((1, 1), self.always), self.least[None, None], shared, exact=exact)
        _, rest = held_once(np.zeros((1, 1)), self.rest[None, None], shared, exact=exact)
        return self._replace(always=float(always.item()), least=least[0, 0], rest=rest[0, 0])


class SharedBytes(NamedTuple):
    """Bytes that a stage shares with another chunk of its device, where they count; shape (N, S).

    Parameters, and what comes with them, count in the later chunk.
    """

    parameters: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    casts: FloatArray
    received: FloatArray
    """What the stage in front has made, and holds as its output for longer than this one, where it is on the device."""


def chunk_memory(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
    in_halves: bool = False,
) -> ChunkMemory:
    """The chunk that runs layers `first`..`end - 1`; arguments as for `stage_memory` and `stages_in`."""
    stages, recompute = one_stage(
        costs,
        first,
        end,
        micro_batches=micro_batches,
        recompute=recompute,
        recomputed=recomputed,
        in_halves=in_halves,
    )
    parts = shared_parts_of(stages, recompute)
    always = {item: round(float(size[0, -1])) for item, size in parts.always.items()}
    return ChunkMemory(StageMemory.of(**always), parts.totals(stages.shape)[1:, 0, -1])


def chunk_by_layers(
    costs: ChainCosts, first: int, end: int, *, micro_batches: int, in_halves: bool = False
) -> ChunkByLayers:
    """The chunk that runs layers `first`..`end - 1` and recomputes some; arguments as for `chunk_memory`.

    With the levels that these make (`planner.core.cost.layer_memory.StageLayers.levels`), its parts are those of
    `chunk_memory(..., recompute="layers")`.
    """
    stages = stages_in(costs, np.array([first]), slice(first, end), micro_batches=micro_batches, in_halves=in_halves)
    none, much = (
        shared_parts_of(with_layers_again(stages, StageLevels(saved, 0.0, 0.0, 0.0)), "layers")
        for saved in (0.0, _MUCH)
    )
    totals = none.totals(stages.shape)[:, 0, -1]
    sizes = [none.sizes.get(name, Size({})) for name in PARTS]
    saved = np.array([size.saved for size in sizes])
    return ChunkByLayers(
        always=float(totals[0]),
        least=totals[1:],
        # Where much is saved, that line is the larger one.
        rest=much.totals(stages.shape)[1:, 0, -1] - saved * _MUCH,
        saved=saved,
        level=np.array([-1 if size.level is None else size.level for size in sizes]),
    )


def chunk_totals(
    costs: ChainCosts, firsts: IntArray, stop: int, *, micro_batches: int, recompute: Recompute, in_halves: bool = False
) -> FloatArray:
    """Whole bytes of what is always there, and of each of `PARTS`, of stages that may share a device.

    Args:
        costs: The chain at the plan's micro-batch size.
        firsts: First layers; must ascend.
        stop: One past the last layer of the longest stages.
        micro_batches: M.
        recompute: On which micro-batches activations are dropped; not `layers`.
        in_halves: Whether backwards may run in halves.

    Returns:
        Shape (1 + parts, firsts, stop - firsts[0]); values left of a row's own first layer mean nothing.
    """
    columns = slice(int(firsts[0]), stop)
    stages = stages_in(costs, firsts, columns, micro_batches=micro_batches, in_halves=in_halves)
    totals = shared_parts_of(stages, recompute).totals(stages.shape)
    if recompute == "never" or not stages.forward_only.any():
        return totals
    return np.where(stages.forward_only, shared_parts_of(stages, "never").totals(stages.shape), totals)


def least_totals_by_layers(
    costs: ChainCosts, firsts: IntArray, stop: int, *, micro_batches: int, in_halves: bool = False
) -> FloatArray:
    """What stages hold that recompute single layers, as if none was recomputed, or less; as `chunk_totals` has it.

    If what the recomputed layers save at most is added as often as `ChunkByLayers` says, no part is smaller.
    """
    columns = slice(int(firsts[0]), stop)
    stages = stages_in(costs, firsts, columns, micro_batches=micro_batches, in_halves=in_halves)
    saved, levels = least_levels(costs, firsts, columns)
    return shared_parts_of(with_layers_again(stages, ManyLevels(saved, *levels)), "layers").totals(stages.shape)


def shared_bytes(costs: ChainCosts, cuts: IntArray, num_devices: int, placement: Placement = "loop") -> SharedBytes:
    """Whole bytes to take off each of S stages, in N ways to cut the chain.

    Gradients are made by the later chunk, whose backward is the first.

    Args:
        costs: The chain.
        cuts: First layer of every stage, and the number of layers; shape (N, S+1).
        num_devices: K.
        placement: Which device has which stages.
    """
    device = np.array([device_of(stage, num_devices, placement) for stage in range(cuts.shape[1] - 1)])
    shared = np.zeros((len(SharedBytes._fields), len(cuts), cuts.shape[1] - 1))
    rows = np.arange(len(cuts))
    for tie in costs.ties:
        if not tie.these_alone:
            continue
        sizes = np.rint([tie.parameter_bytes, tie.gradient_bytes, tie.optimizer_bytes, tie.cast_bytes])
        second = (cuts[:, 1:-1] <= tie.second).sum(axis=1)
        is_open = np.ones(len(cuts), bool)
        for layer in (tie.first, *reversed(tie.earlier)):  # the nearest on the same device; in one stage it is counted
            first = (cuts[:, 1:-1] <= layer).sum(axis=1)
            same_device = is_open & (device[second] == device[first])
            shares = same_device & (first != second)
            shared[: len(sizes), rows[shares], first[shares]] += sizes[:, None]
            is_open &= ~same_device
    handed_over = np.flatnonzero(device[1:] == device[:-1]) + 1
    first_layers = np.minimum(cuts[:, handed_over], costs.num_layers - 1)
    shared[-1][:, handed_over] = np.rint(costs.boundaries.input[first_layers])
    return SharedBytes(*shared)


def most_handed_over_bytes(costs: ChainCosts, counts: IntArray | FloatArray) -> float:
    """The most that `held_once` takes off a stage for its input, with so many of each of `PARTS`."""
    largest = float(np.rint(costs.boundaries.input.max())) if costs.exact else 0.0
    return largest * float(counts[[_PLACE[name] for name in _WITH_INPUT]].sum())


def held_once(
    always: FloatArray, parts: FloatArray, shared: SharedBytes, *, exact: bool
) -> tuple[FloatArray, FloatArray]:
    """What stages need (shape (N, S), and of each of `PARTS`: (N, S, parts)), `shared` taken off.

    Without exact records gradients are always there.
    """
    parts = parts.copy()
    parts[..., _PLACE["casts"]] -= shared.casts
    if exact:
        parts[..., _PLACE["gradients"]] -= shared.gradients
        for name in _WITH_INPUT:
            parts[..., _PLACE[name]] = np.maximum(parts[..., _PLACE[name]] - shared.received, 0.0)
    return always - shared.parameters - shared.optimizer - (0.0 if exact else shared.gradients), parts


def device_peaks(always: FloatArray, parts: FloatArray, *, moments: IntArray | FloatArray) -> FloatArray:
    """Peak of N devices with V chunks each, in bytes; shape (N,).

    Args:
        always: Shape (N, V).
        parts: Of each of `PARTS`: shape (N, V, parts).
        moments: Of the device, as `planner.core.cost.moments.moments_of` gives them.
    """
    alive = parts.reshape(len(parts), -1) @ moments.reshape(len(moments), -1).T
    peaks: FloatArray = always.sum(axis=1) + alive.max(axis=1)
    return peaks


def device_peaks_by_choice(
    always: FloatArray, parts: FloatArray, ways: IntArray, *, moments: IntArray | FloatArray
) -> FloatArray:
    """Peak of N devices with V chunks each under each of W ways to choose among C for every chunk; shape (N, W).

    Args:
        always: Shape (C, N, V).
        parts: Of each of `PARTS`: shape (C, N, V, parts).
        ways: The choice for each chunk, shape (W, V).
        moments: As for `device_peaks`, which returns the same for a single way.
    """
    fixed, alive = np.zeros(1), np.zeros(1)
    for chunk, choices in enumerate(ways.T):
        fixed = fixed + always[choices, :, chunk]
        alive = alive + (parts[:, :, chunk] @ moments[:, chunk].T)[choices]
    peaks: FloatArray = np.transpose(fixed + np.max(alive, axis=2))
    return peaks


def device_memory(chunks: Sequence[ChunkMemory], moments: IntArray, reserve_bytes: int = 0) -> tuple[StageMemory, ...]:
    """Each chunk's part of the device's peak, whose total is their sum; the reserve is counted in the first.

    Args:
        chunks: Of the device.
        moments: Of the device, as `planner.core.cost.moments.moments_of` gives them.
        reserve_bytes: Of the device.
    """
    parts = np.stack([chunk.parts for chunk in chunks])
    peak = moments[int((moments * parts).sum(axis=(1, 2)).argmax())]
    items = (peak[:, :, None] * itemised(parts)).sum(axis=1).astype(int)
    return tuple(
        StageMemory.of(
            **{item: getattr(chunk.always, item) + more for item, more in zip(ITEMS, of_chunk, strict=True)},
            reserve=reserve_bytes if v == 0 else 0,
        )
        for v, (chunk, of_chunk) in enumerate(zip(chunks, items.tolist(), strict=True))
    )


def itemised(parts: FloatArray) -> FloatArray:
    """Return the bytes of every part by the item of `ITEMS` under which a plan shows them.

    Args:
        parts: Whole bytes of each of `PARTS`; shape (..., parts).

    Returns:
        Shape (..., parts, items).
    """
    items = np.zeros((*parts.shape, len(ITEMS)))
    for part, item in _ITEM_OF.items():
        items[..., _PLACE[part], ITEMS.index(item)] = parts[..., _PLACE[part]]
    running = parts[..., _RUNNING]
    # Of the micro-batch that runs, what it would hold if it waited counts as in flight.
    waiting = np.minimum(parts[..., _PLACE["held"], None], running)
    received = np.minimum(parts[..., _PLACE["output_gradient"], None], running - waiting)
    received = np.where([part in WITH_BACKWARDS for part in RUNNING], received, 0.0)
    items[..., _RUNNING, ITEMS.index("in_flight")] = waiting
    items[..., _RUNNING, ITEMS.index("transfer")] = received
    items[..., _RUNNING, ITEMS.index("working")] = running - waiting - received
    return items
