"""Stages that have numbers on the page: all stages of a short chain, those near the initial cuts of a long one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, sums_before
from planner.core.schedule import KINDS, Need, message_from, message_to, needed_for
from planner.core.values.cluster import Cluster, Link
from planner.core.values.placement import Placement, device_of

IntArray = NDArray[np.int64]

_FLOWS = ("F", "B")


class Cells(NamedTuple):
    """Stages of layers first..end-1 on devices of a speed; arrays of one length, in ascending order."""

    speed: IntArray
    """Index into `DeviceGroup.speeds`."""
    first: IntArray
    end: IntArray


class Crossings(NamedTuple):
    """Cuts of the chain that a link may carry; arrays of one length, in ascending order."""

    link: IntArray
    """Index into `DeviceGroup.links`."""
    cut: IntArray


class DeviceGroup:
    """Devices of a pipeline with their distinct speeds and links."""

    def __init__(self, cluster: Cluster, devices: Sequence[int], replicas: int) -> None:
        self.cluster, self.replicas, self.num_devices = cluster, replicas, len(devices)
        speeds = [cluster.speed(place) for place in devices]
        self.speeds = tuple(dict.fromkeys(speeds))
        self.speed_of = [self.speeds.index(speed) for speed in speeds]
        self._links: dict[Link, int] = {}

    @property
    def links(self) -> tuple[Link, ...]:
        """Links that any layout uses."""
        return tuple(self._links)

    def link(self, device: int, neighbor: int) -> int:
        """Return the index of the link between two devices; -1 within a device."""
        if device == neighbor:
            return -1
        link = self.cluster.link_between(device, neighbor, num_devices=self.num_devices, replicas=self.replicas)
        return self._links.setdefault(link, len(self._links))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Stages on the devices of a pipeline: V on each of K, in pipeline order."""

    placement: Placement
    devices: tuple[int, ...]
    """Device of each stage."""
    speeds: tuple[int, ...]
    """Index of the device's speed, for each stage."""
    links: tuple[int, ...]
    """Index of the link of each boundary; -1 within a device."""

    @classmethod
    def of(cls, pipeline: DeviceGroup, chunks: int, placement: Placement) -> "StageLayout":
        """Return the layout of `chunks` stages on each device.

        Args:
            pipeline: Devices and links.
            chunks: V.
            placement: Placement of the stages.

        Returns:
            The layout.
        """
        num_devices = pipeline.num_devices
        devices = tuple(device_of(stage, num_devices, placement) for stage in range(num_devices * chunks))
        return cls(
            placement=placement,
            devices=devices,
            speeds=tuple(pipeline.speed_of[device] for device in devices),
            links=tuple(pipeline.link(*pair) for pair in pairwise(devices)),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages, S."""
        return len(self.devices)

    def data(self) -> dict[str, object]:
        """Return the dependencies and messages of every action for the page, indexed by 4 * stage + kind.

        A message is flow * S + stage. A boundary is the stage before it; -1 means none.
        """
        every = [(kind, stage) for stage in range(self.num_stages) for kind in KINDS]
        makes = [self._message(None if (flow := KINDS[kind].flow) is None else Need(flow, s)) for kind, s in every]
        return {
            "devices": self.devices,
            "speeds": self.speeds,
            "links": self.links,
            "needs": [self._message(needed_for(kind, stage, self.num_stages)) for kind, stage in every],
            "makes": makes,
            "received": [self._boundary(stage, message_from(kind, stage, self.num_stages)) for kind, stage in every],
            "sent": [self._boundary(stage, message_to(kind, stage, self.num_stages)) for kind, stage in every],
        }

    def _message(self, need: Need | None) -> int:
        return -1 if need is None else _FLOWS.index(need.flow) * self.num_stages + need.stage

    def _boundary(self, stage: int, neighbor: int | None) -> int:
        if neighbor is None or self.devices[neighbor] == self.devices[stage]:
            return -1
        return min(stage, neighbor)


def even_balance(costs: ChainCosts, num_stages: int) -> tuple[int, ...]:
    """Return cuts into `num_stages` stages with nearly equal times and at least one layer each."""
    sums, num_layers = sums_before(costs.forward_us + costs.backward_us), costs.num_layers
    cuts = [0]
    for stage in range(1, num_stages):
        near = np.abs(sums - sums[-1] * stage / num_stages)
        least, most = cuts[-1] + 1, num_layers - (num_stages - stage)
        cuts.append(least + int(near[least : most + 1].argmin()))
    return tuple(end - first for first, end in pairwise([*cuts, num_layers]))


def stages_near(
    layouts: Iterable[StageLayout], balances: Mapping[int, Sequence[int]], widths: Mapping[int, int]
) -> tuple[Cells, Crossings]:
    """Return the stages between cuts that are at most `widths` layers from those of `balances`.

    Args:
        layouts: Layouts of the page.
        balances: Initial layers of each stage, by number of stages.
        widths: Largest distances in layers, by number of stages.

    Returns:
        The stages, and the cuts with their links.
    """
    cells: set[tuple[int, int, int]] = set()
    crossings: set[tuple[int, int]] = set()
    for layout in layouts:
        ranges = list(_cut_ranges(balances[layout.num_stages], widths[layout.num_stages]))
        for speed, (firsts, ends) in zip(layout.speeds, pairwise(ranges), strict=True):
            cells.update((speed, first, end) for first, end in product(firsts, ends) if first < end)
        for link, cuts in zip(layout.links, ranges[1:], strict=False):
            crossings.update((link, cut) for cut in cuts if link >= 0)
    return (
        Cells(*np.array(sorted(cells), np.int64).T),
        Crossings(*np.array(sorted(crossings), np.int64).reshape(-1, 2).T),
    )


def _cut_ranges(balance: Sequence[int], width: int) -> Iterator[range]:
    """Yield the range of every cut, including both ends of the chain."""
    num_stages, num_layers = len(balance), sum(balance)
    for k, cut in enumerate(accumulate(balance, initial=0)):
        if k in (0, num_stages):
            yield range(cut, cut + 1)
        else:
            yield range(max(k, cut - width), min(num_layers - num_stages + k, cut + width) + 1)


def runs_of(*columns: IntArray) -> list[int]:
    """Return ascending rows as runs that differ in the last number: each run's first row, and its last number."""
    rows = np.stack(columns, axis=1)
    is_next = (np.diff(rows[:, :-1], axis=0) == 0).all(axis=1) & (np.diff(rows[:, -1]) == 1)
    begins = np.flatnonzero(np.concatenate([[True], ~is_next])) if len(rows) else np.zeros(0, np.int64)
    ends = np.append(begins[1:], len(rows)) - 1 if len(rows) else begins
    runs: list[int] = np.column_stack([rows[begins], rows[ends, -1]]).ravel().tolist()
    return runs
