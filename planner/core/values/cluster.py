"""What the plan has to run on: devices in pipeline order, their memory, and the links between neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from planner.core.values.nodes import are_apart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Size = TypeVar("Size", float, "NDArray[np.float64]")
"""Bytes of one thing, or of many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One connection between neighbouring stages, the same in both directions at once (full duplex).

    `blocking` links keep the receiving stage busy for the whole transfer, as gloo on CPUs does; others overlap
    with compute. The default link costs nothing.
    """

    latency_us: float = 0.0
    bytes_per_s: float = 0.0
    """0 means unlimited."""
    blocking: bool = False

    def transfer_us(self, size_bytes: Size) -> Size:
        """Time to move `size_bytes` once, in microseconds: latency + size / bandwidth."""
        if self.bytes_per_s == 0:
            return self.latency_us + 0 * size_bytes
        return self.latency_us + size_bytes / self.bytes_per_s * 1e6

    @classmethod
    def slowest(cls, links: Sequence["Link"]) -> "Link":
        """What several links are at most, whatever the size: the longest latency with the smallest bandwidth."""
        rates = [link.bytes_per_s for link in links if link.bytes_per_s]
        return cls(
            latency_us=max((link.latency_us for link in links), default=0.0),
            bytes_per_s=min(rates, default=0.0),
            blocking=any(link.blocking for link in links),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCost:
    """What the bundled executor itself costs on a machine."""

    overhead_us: float
    """Per micro-batch, stage and direction."""
    link: Link
    """Between two processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one pipeline and what joins them. `memory_bytes[d]` is the cap of device d."""

    memory_bytes: tuple[int, ...]
    speeds: tuple[float, ...] = ()
    """How many times faster than the profiled device each is; empty where all are as fast as it."""
    compute: float = 1.0
    """How many times what was profiled all computing takes, as a run measured it."""
    link: Link = field(default_factory=Link)
    inter_link: Link | None = None
    """Between nodes, where that differs."""
    node_devices: int = 0
    """Devices per node; 0 where all are in one."""
    links: tuple[Link, ...] = ()
    """The one behind every device, where each is known; the three fields above do not count then."""
    allreduce: Link | None = None
    """What replicas sum gradients over; None where that costs nothing."""
    reserve_bytes: int = 0
    """Context, libraries and allocator slack on every device; counted inside the cap."""
    overhead_us: float = 0.0
    """The executor's own time per micro-batch, stage and direction."""

    @property
    def num_devices(self) -> int:
        """Devices there are."""
        return len(self.memory_bytes)

    def speed(self, device: int) -> float:
        """How many times faster than the profiled device `device` is."""
        return (self.speeds[device] if self.speeds else 1.0) / self.compute

    def link_behind(self, device: int, *, num_devices: int, replicas: int = 1) -> Link:
        """The link from `device` to the next one of a pipeline of `num_devices`, from the last one back to the first.

        Replicas lie one behind the other: the slowest of their links counts, because all wait for each other. Where
        links are known one by one, the way back from the last device is not: the slowest link of the pipeline stands
        for it.
        """
        if self.links:
            ways = [device] if device + 1 < num_devices else range(num_devices - 1)
            return Link.slowest([self.links[r * num_devices + d] for r in range(replicas) for d in ways])
        if self.inter_link is None or self.node_devices == 0:
            return self.link
        follows = (device + 1) % num_devices
        places = [(r * num_devices + device, r * num_devices + follows) for r in range(replicas)]
        leaves = any(are_apart(a, b, self.node_devices) for a, b in places)
        return self.inter_link if leaves else self.link

    def link_between(self, device: int, neighbour: int, *, num_devices: int, replicas: int = 1) -> Link:
        """The link between two devices of a pipeline, one of which follows the other; within a device nothing costs."""
        if device == neighbour:
            return Link()
        # Second chunks of a V go the other way over the links of the first ones.
        back = device == neighbour + 1
        return self.link_behind(neighbour if back else device, num_devices=num_devices, replicas=replicas)

    def allreduce_us(self, gradient_bytes: Size, replicas: int) -> Size:
        """Time to sum gradients over the replicas, as a ring does it, in microseconds.

        Every replica sends and receives 2 (R-1) pieces of 1/R of the bytes, one after the other (Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
        """
        if self.allreduce is None or replicas == 1:
            return 0 * gradient_bytes
        # Where there are no gradients, nothing waits for the latency either.
        return 2 * (replicas - 1) * self.allreduce.transfer_us(gradient_bytes / replicas) * (gradient_bytes > 0)
