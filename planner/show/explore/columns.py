"""Columns of the number tables in the interactive report: memory and times of stages, and transfer times."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.allocations import MemoryByAllocation, memory_on_shared_device, stage_memory_by_allocation
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.device_memory import SharedBytes, bytes_by_component, subtract_shared
from planner.core.cost.peak_points import ALLOCATIONS
from planner.core.cost.stage_time import CHOICES, ChainSums, optimizer_slack_us
from planner.core.cost.stages import StageMemoryTable, stage_memory_table
from planner.core.schedule import KINDS
from planner.core.values.plan import ITEMS, Recompute
from planner.show.explore.tables import ZERO, NumberTable
from planner.show.explore.windows import DeviceGroup, LinkCutPairs, StageRows

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ALONE, ALONE_ONCE, SHARED, IN_PLACE = range(4)
"""Sharing modes: how a stage shares its device with other stages.

ALONE: no other stage is on the device. ALONE_ONCE: as ALONE, with one micro-batch in flight. SHARED: other stages are
on the device. IN_PLACE: as SHARED, and the previous stage is on the same device.
"""

ALWAYS: Final = -1
"""Number used in place of an index into `ALLOCATIONS`, for memory that exists during the whole step."""

_MOST_AT_ONCE: Final = 1 << 14
"""Largest number of stages whose memory is computed at the same time, which limits temporary memory."""

Components = Mapping[tuple[int, int], FloatArray]
"""Bytes of each stage, by index into `ALLOCATIONS` (or `ALWAYS`) and index into `ITEMS`."""


class _RowBlock(NamedTuple):
    """Rows of a table whose values are computed in one call."""

    rows: IntArray
    """Indices of the rows in the table."""
    stages: StageMemoryTable
    """Table that contains the stage of each row."""
    places: tuple[IntArray, IntArray]
    """Indices of each row's stage in the two dimensions of `stages`: first layer, last layer."""
    received: FloatArray
    """Bytes that the stage of each row receives as input."""


def add_memory_columns(
    table: NumberTable, costs: ChainCosts, stages: StageRows, *, micro_batches: int, allocations: Sequence[set[int]]
) -> list[list[list[int]]]:
    """Add columns with the memory of stages, in bytes, to a table, and return their indices.

    Args:
        table: Table with a row per stage.
        costs: Costs of the chain at the micro-batch size, with its replicas.
        stages: Stage of each row.
        micro_batches: Number of micro-batches.
        allocations: For each sharing mode, the allocations to add, as indices into `ALLOCATIONS`. The sharing modes,
            `ALONE` to `IN_PLACE`, state how a stage shares its device with other stages.

    Returns:
        A list for each sharing mode, with a list for each recompute choice in `CHOICES`. An inner list has three
        numbers for each column, one column after another:

        - allocation of the column, as an index into `ALLOCATIONS`, or `ALWAYS` for memory that exists during the whole
          step
        - memory component of the column, as an index into `ITEMS`
        - index of the column in `table`

        The list of a sharing mode without allocations is empty. Columns of zeros are omitted.
    """
    blocks = tuple(_blocks(costs, stages, micro_batches))
    return [
        [_listed(table, blocks, mode, choice, used={ALWAYS, *used}) for choice in CHOICES] if used else []
        for mode, used in enumerate(allocations)
    ]


def _listed(
    table: NumberTable, blocks: Sequence[_RowBlock], mode: int, choice: Recompute, *, used: set[int]
) -> list[int]:
    by_block = [_components(block, mode, choice) for block in blocks]
    listed: list[int] = []
    for allocation, item in sorted({key for components in by_block for key in components if key[0] in used}):
        column = np.zeros(table.num_rows)
        for block, components in zip(blocks, by_block, strict=True):
            column[block.rows] = components.get((allocation, item), 0.0)
        if (place := table.add(column)) != ZERO:
            listed += (allocation, item, place)
    return listed


def _blocks(costs: ChainCosts, stages: StageRows, micro_batches: int) -> Iterator[_RowBlock]:
    firsts, group = np.unique(stages.first, return_inverse=True)
    ends = np.zeros(len(firsts), np.int64)
    np.maximum.at(ends, group, stages.end)
    at = 0
    while at < len(firsts):
        most = np.maximum.accumulate(ends[at:])
        sizes = np.arange(1, len(firsts) - at + 1) * (most - firsts[at])
        stop = at + max(1, int(np.searchsorted(sizes, _MOST_AT_ONCE, side="right")))
        columns = slice(int(firsts[at]), int(most[stop - at - 1]))
        rows = np.flatnonzero((group >= at) & (group < stop))
        yield _RowBlock(
            rows=rows,
            stages=stage_memory_table(
                costs, firsts[at:stop], columns, micro_batches=micro_batches, splits_backward=True
            ),
            places=(group[rows] - at, stages.end[rows] - 1 - columns.start),
            received=costs.boundaries.input[stages.first[rows]],
        )
        at = stop


def _components(block: _RowBlock, mode: int, choice: Recompute) -> Components:
    components = _chosen(block, mode, choice)
    if choice == "never" or not block.stages.forward_only.any():
        return components
    # If no earlier layer is trained, there is no backward, and nothing is recomputed.
    never, forward_only = _chosen(block, mode, "never"), block.stages.forward_only[block.places]
    return {key: np.where(forward_only, never.get(key, 0.0), components.get(key, 0.0)) for key in {*never, *components}}


def _chosen(block: _RowBlock, mode: int, choice: Recompute) -> Components:
    stages = block.stages
    if mode in (SHARED, IN_PLACE):
        components = _among_others(block, memory_on_shared_device(stages, choice), is_in_place=mode == IN_PLACE)
    else:
        memory = stage_memory_by_allocation(stages, choice, in_flight=1 if mode == ALONE_ONCE else 2)
        sizes = {ALWAYS: memory.always} | {ALLOCATIONS.index(name): size.items for name, size in memory.sizes.items()}
        components = {
            (allocation, ITEMS.index(item)): _at(block, size)
            for allocation, items in sizes.items()
            for item, size in items.items()
        }
    # Stages without gradients send none to other replicas.
    sends = _at(block, stages.message) > 0
    messages = {ALLOCATIONS.index("message"), ALLOCATIONS.index("weight_message")}
    return {key: size * sends if key[0] in messages else size for key, size in components.items()}


def _among_others(block: _RowBlock, memory: MemoryByAllocation, *, is_in_place: bool) -> Components:
    sizes = np.stack([_at(block, size) for size in memory.totals(block.stages.shape)[1:]], axis=-1)
    if is_in_place:
        none = np.zeros(1)
        shared = SharedBytes(none, none, none, none, received=np.rint(block.received))
        _, sizes = subtract_shared(none, sizes, shared, exact=block.stages.exact)
    by_item = bytes_by_component(sizes)
    always = {(ALWAYS, ITEMS.index(item)): np.rint(_at(block, size)) for item, size in memory.always.items()}
    places = np.argwhere(by_item.any(axis=0)).tolist()
    return {**always, **{(allocation, item): by_item[:, allocation, item] for allocation, item in places}}


def _at(block: _RowBlock, size: FloatArray | float) -> FloatArray:
    return np.broadcast_to(size, block.stages.shape)[block.places]


def add_time_columns(
    table: NumberTable, costs: ChainCosts, stages: StageRows, pipeline: DeviceGroup
) -> dict[str, object]:
    """Add columns with the compute times of stages to a table.

    Args:
        table: Table with a row per stage.
        costs: Costs of the chain at the micro-batch size.
        stages: Stage of each row.
        pipeline: Devices and links of the pipeline.

    Returns:
        JSON data with the indices of the added columns.
    """
    sums, speed = ChainSums.of(costs, pipeline.cluster, pipeline.replicas), np.array(pipeline.speeds)[stages.speed]
    durations, again = [], []
    for choice in range(len(CHOICES)):
        busy = sums.busy_times(stages.first, stages.end, choice, speed=speed)
        split = sums.split_backward_times(busy, stages.first, stages.end, speed=speed)
        by_kind = {
            "F": (busy.forward_us, busy.forward_us),
            "B": (busy.backward_us, busy.last_backward_us),
            "I": (split.input_backward_us, split.last_input_backward_us),
            "W": (split.weight_backward_us, split.weight_backward_us),
        }
        durations.append([table.add(us) for letter in KINDS for us in by_kind[letter]])
        redone = [table.add(busy.recompute_us), table.add(busy.last_recompute_us)]
        again.append([place for kind in KINDS.values() for place in (redone if kind.direction < 0 else [ZERO, ZERO])])
    summed_us = sums.gradient_allreduce_us(stages.first, stages.end)
    return {
        # By recompute choice, then two columns for each kind of action: other micro-batches, last micro-batch.
        "durations": durations,
        "again": again,
        "optimizer": table.add(sums.between_steps_us(stages.first, stages.end, speed) - summed_us),
        "summed": table.add(summed_us),
        # `send_hides` is added to this time if the stage sends to another device.
        "hides": table.add(optimizer_slack_us(busy, 0.0)),
    }


def add_transfer_columns(
    table: NumberTable, costs: ChainCosts, link_cuts: LinkCutPairs, pipeline: DeviceGroup
) -> dict[str, int]:
    """Add columns with transfer times to a table.

    Args:
        table: Table with a row per pair of link and cut.
        costs: Costs of the chain at the micro-batch size.
        link_cuts: Link and cut of each row.
        pipeline: Devices and links of the pipeline.

    Returns:
        JSON data with the indices of the added columns.
    """
    sent = costs.boundaries.output[link_cuts.cut - 1].tolist()
    send_us = [
        pipeline.indexed_links[link].transfer_us(size) for link, size in zip(link_cuts.link.tolist(), sent, strict=True)
    ]
    return {"send": table.add(np.array(send_us)), "send_hides": table.add(2 * np.array(send_us))}
