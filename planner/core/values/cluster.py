"""Cluster: devices in pipeline order, their memory, and the links between neighbors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from planner.core.values.nodes import are_on_different_nodes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Size = TypeVar("Size", float, "NDArray[np.float64]")
"""Bytes of one tensor, or an array of sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection between neighboring devices. It can send in both directions at once, at the same rate.

    A `blocking` link keeps the receiving stage busy for the whole transfer, as gloo on CPUs does. Transfers over other
    links overlap with compute. Over the default link, transfers take no time.
    """

    latency_us: float = 0.0
    bytes_per_s: float = 0.0
    """Bandwidth; 0 means unlimited."""
    blocking: bool = False

    def transfer_us(self, size_bytes: Size) -> Size:
        """Return the time to move `size_bytes` once, in microseconds: latency + size / bandwidth."""
        if self.bytes_per_s == 0:
            return self.latency_us + 0 * size_bytes
        return self.latency_us + size_bytes / self.bytes_per_s * 1e6

    @classmethod
    def slowest(cls, links: Sequence["Link"]) -> "Link":
        """Return a link with the longest latency and the smallest bandwidth of `links`."""
        rates = [link.bytes_per_s for link in links if link.bytes_per_s]
        return cls(
            latency_us=max((link.latency_us for link in links), default=0.0),
            bytes_per_s=min(rates, default=0.0),
            blocking=any(link.blocking for link in links),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCost:
    """Costs of the executor (the training engine of this package) on a machine."""

    overhead_us: float
    """Time of the executor itself per micro-batch, stage and direction (forward or backward)."""
    link: Link
    """Link between two processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of all pipelines and their links. `memory_bytes[d]` is the memory limit of device d."""

    memory_bytes: tuple[int, ...]
    speeds: tuple[float, ...] = ()
    """Speed of each device relative to the profiled device; empty if all devices are as fast as the profiled one."""
    compute: float = 1.0
    """Ratio of measured to profiled compute time, from a calibration."""
    link: Link = field(default_factory=Link)
    inter_link: Link | None = None
    """Link between nodes, if it differs from the link within a node."""
    node_devices: int = 0
    """Devices per node; 0 if all are in one node."""
    links: tuple[Link, ...] = ()
    """Link from every device to the next, if each is known; replaces `link`, `inter_link` and `node_devices`."""
    allreduce: Link | None = None
    """Link over which replicas sum gradients; None if the sums take no time."""
    reserve_bytes: int = 0
    """Context, libraries and allocator slack of every device; counted against the memory limit."""
    overhead_us: float = 0.0
    """Time of the executor itself per micro-batch, stage and direction (forward or backward)."""
    tensor_parallel: int = 1
    """Number of GPUs per device (T); they share each layer. Memory limits, speeds and links are those of one GPU."""
    optimizer_shards: int = 1
    """Number of replicas among which the optimizer is divided; 1 if each replica has the whole optimizer."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.memory_bytes)

    def speed(self, device: int) -> float:
        """Return the speed of `device` relative to the profiled device, corrected by the calibrated `compute` ratio."""
        return (self.speeds[device] if self.speeds else 1.0) / self.compute

    def link_after(self, device: int, *, num_devices: int, replicas: int = 1) -> Link:
        """Return the link from `device` to the next device of its pipeline; the last device is followed by the first.

        With K = `num_devices`, pipeline r has the devices from r * K to (r + 1) * K - 1. The pipelines wait for each
        other. If their links differ, the result is therefore the slowest link.

        Args:
            device: Index of the device in its pipeline.
            num_devices: Devices of one pipeline.
            replicas: Number of pipelines.
        """
        if self.links:
            links = [device] if device + 1 < num_devices else range(num_devices - 1)
            return Link.slowest([self.links[r * num_devices + d] for r in range(replicas) for d in links])
        if self.inter_link is None or self.node_devices == 0:
            return self.link
        follows = (device + 1) % num_devices
        places = [(r * num_devices + device, r * num_devices + follows) for r in range(replicas)]
        leaves = any(are_on_different_nodes(a, b, self.node_devices) for a, b in places)
        return self.inter_link if leaves else self.link

    def link_between(self, device: int, neighbor: int, *, num_devices: int, replicas: int = 1) -> Link:
        """Return the link between two neighboring devices of a pipeline; the default link if they are the same device.

        Args:
            device: Index of one device in its pipeline.
            neighbor: Index of the other device.
            num_devices: Devices of one pipeline.
            replicas: Number of pipelines.
        """
        if device == neighbor:
            return Link()
        # The second stages of a V use the same links in the other direction.
        back = device == neighbor + 1
        return self.link_after(neighbor if back else device, num_devices=num_devices, replicas=replicas)

    def allreduce_us(self, gradient_bytes: Size, replicas: int) -> Size:
        """Return the time to sum gradients over the replicas by a ring, in microseconds.

        Each of the R replicas sends and receives 2 (R-1) pieces, one after the other; a piece is 1/R of the bytes
        (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
        """
        if self.allreduce is None or replicas == 1:
            return 0 * gradient_bytes
        # Without gradients there is no latency either.
        return 2 * (replicas - 1) * self.allreduce.transfer_us(gradient_bytes / replicas) * (gradient_bytes > 0)
