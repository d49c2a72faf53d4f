"""Stages in the interactive report: all possible stages of a short chain, or only stages near the initial cuts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, prefix_sums
from planner.core.schedule import KINDS, NeededMessage, needed_message, receiving_stage, sending_stage
from planner.core.values.cluster import Cluster, Link
from planner.core.values.placement import Placement, device_of

IntArray = NDArray[np.int64]

_FLOWS = ("F", "B")


class StageRows(NamedTuple):
    """Stages with their layers and device speeds, as sorted arrays of equal length."""

    speed: IntArray
    """Index into `DeviceGroup.speeds`."""
    first: IntArray
    """Index of the stage's first layer."""
    end: IntArray
    """Index after the stage's last layer."""


class LinkCutPairs(NamedTuple):
    """Sorted pairs (link, cut) as arrays of equal length: each link over which the tensors at a cut may be sent."""

    link: IntArray
    """Index into `DeviceGroup.indexed_links`."""
    cut: IntArray
    """Number of layers before the cut."""


class DeviceGroup:
    """Devices of a pipeline, with their distinct speeds and links."""

    def __init__(self, cluster: Cluster, devices: Sequence[int], replicas: int) -> None:
        self.cluster, self.replicas, self.num_devices = cluster, replicas, len(devices)
        speeds = [cluster.speed(place) for place in devices]
        self.speeds = tuple(dict.fromkeys(speeds))
        self.speed_of = [self.speeds.index(speed) for speed in speeds]
        self._links: dict[Link, int] = {}

    @property
    def indexed_links(self) -> tuple[Link, ...]:
        """Distinct links for which `link_index` was called."""
        return tuple(self._links)

    def link_index(self, device: int, neighbor: int) -> int:
        """Return the index of the link between two devices; -1 if both are the same device."""
        if device == neighbor:
            return -1
        link = self.cluster.link_between(device, neighbor, num_devices=self.num_devices, replicas=self.replicas)
        return self._links.setdefault(link, len(self._links))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Placement of stages on a pipeline's devices, with the messages between them."""

    placement: Placement
    devices: tuple[int, ...]
    """Device of each stage."""
    speeds: tuple[int, ...]
    """Index of each stage's speed in `DeviceGroup.speeds`."""
    links: tuple[int, ...]
    """Index of each boundary's link in `DeviceGroup.indexed_links`; -1 if both stages are on one device."""

    @classmethod
    def of(cls, pipeline: DeviceGroup, chunks: int, placement: Placement) -> "StageLayout":
        """Return the layout of the stages on the devices of a pipeline.

        Args:
            pipeline: Devices of one pipeline.
            chunks: Number of stages on each device.
            placement: Placement of the stages on the devices.
        """
        num_devices = pipeline.num_devices
        devices = tuple(device_of(stage, num_devices, placement) for stage in range(num_devices * chunks))
        return cls(
            placement=placement,
            devices=devices,
            speeds=tuple(pipeline.speed_of[device] for device in devices),
            links=tuple(pipeline.link_index(*pair) for pair in pairwise(devices)),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.devices)

    def json_data(self) -> dict[str, object]:
        """Return the dependencies and messages of every action, for the JSON data of the interactive report."""
        # The action of kind k (F, B, I, W: 0 to 3) on a stage has the index 4 * stage + k in each list:
        #
        #     needs       message that the action waits for
        #     makes       message that the action creates
        #     received    boundary over which the needed message arrives
        #     sent        boundary over which the created message leaves
        #
        # Message s has the activations of stage s. With S stages, message S + s has the gradient of its input.
        # A boundary is the index of the stage before it. -1 means none.
        every = [(kind, stage) for stage in range(self.num_stages) for kind in KINDS]
        makes = [
            self._message(
                None if (message_kind := KINDS[kind].message_kind) is None else NeededMessage(message_kind, s)
            )
            for kind, s in every
        ]
        return {
            "devices": self.devices,
            "speeds": self.speeds,
            "links": self.links,
            "needs": [self._message(needed_message(kind, stage, self.num_stages)) for kind, stage in every],
            "makes": makes,
            "received": [self._boundary(stage, sending_stage(kind, stage, self.num_stages)) for kind, stage in every],
            "sent": [self._boundary(stage, receiving_stage(kind, stage, self.num_stages)) for kind, stage in every],
        }

    def _message(self, need: NeededMessage | None) -> int:
        return -1 if need is None else _FLOWS.index(need.message_kind) * self.num_stages + need.stage

    def _boundary(self, stage: int, neighbor: int | None) -> int:
        if neighbor is None or self.devices[neighbor] == self.devices[stage]:
            return -1
        return min(stage, neighbor)


def even_balance(costs: ChainCosts, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least 1, so that stages have nearly equal times."""
    sums, num_layers = prefix_sums(costs.forward_us + costs.backward_us), costs.num_layers
    cuts = [0]
    for stage in range(1, num_stages):
        near = np.abs(sums - sums[-1] * stage / num_stages)
        least, most = cuts[-1] + 1, num_layers - (num_stages - stage)
        cuts.append(least + int(near[least : most + 1].argmin()))
    return tuple(end - first for first, end in pairwise([*cuts, num_layers]))


def stages_near(
    layouts: Iterable[StageLayout], balances: Mapping[int, Sequence[int]], max_cut_moves: Mapping[int, int]
) -> tuple[StageRows, LinkCutPairs]:
    """Return all stages and cuts that can result if each initial cut moves by at most `max_cut_moves` layers.

    Args:
        layouts: Layouts of the stages in the interactive report.
        balances: Initial number of layers of each stage, by number of stages.
        max_cut_moves: Largest number of layers by which a cut moves, by number of stages.
    """
    cells: set[tuple[int, int, int]] = set()
    crossings: set[tuple[int, int]] = set()
    for layout in layouts:
        ranges = list(_cut_ranges(balances[layout.num_stages], max_cut_moves[layout.num_stages]))
        for speed, (firsts, ends) in zip(layout.speeds, pairwise(ranges), strict=True):
            cells.update((speed, first, end) for first, end in product(firsts, ends) if first < end)
        for link, cuts in zip(layout.links, ranges[1:], strict=False):
            crossings.update((link, cut) for cut in cuts if link >= 0)
    return (
        StageRows(*np.array(sorted(cells), np.int64).T),
        LinkCutPairs(*np.array(sorted(crossings), np.int64).reshape(-1, 2).T),
    )


def _cut_ranges(balance: Sequence[int], width: int) -> Iterator[range]:
    num_stages, num_layers = len(balance), sum(balance)
    for k, cut in enumerate(accumulate(balance, initial=0)):
        if k in (0, num_stages):
            yield range(cut, cut + 1)
        else:
            yield range(max(k, cut - width), min(num_layers - num_stages + k, cut + width) + 1)


def run_length_encode(*columns: IntArray) -> list[int]:
    """Encode sorted rows of numbers as a flat list of runs.

    A run is a sequence of rows. From row to row, the last number grows by 1, and the other numbers stay the same.

    Args:
        columns: Columns of the rows, all of the same length.

    Returns:
        For each run, all numbers of its first row, then the last number of its last row.
    """
    # In a run of rows, the last number grows by 1 from row to row, and the other numbers are equal.
    rows = np.stack(columns, axis=1)
    is_next = (np.diff(rows[:, :-1], axis=0) == 0).all(axis=1) & (np.diff(rows[:, -1]) == 1)
    begins = np.flatnonzero(np.concatenate([[True], ~is_next])) if len(rows) else np.zeros(0, np.int64)
    ends = np.append(begins[1:], len(rows)) - 1 if len(rows) else begins
    runs: list[int] = np.column_stack([rows[begins], rows[ends, -1]]).ravel().tolist()
    return runs
