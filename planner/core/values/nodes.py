"""Machines with several devices each. Ranks are numbered node by node."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Machines with equal numbers of devices."""

    count: int
    devices: int
    """Number of devices, and therefore of processes, of each node."""

    @property
    def num_processes(self) -> int:
        """Number of processes on all nodes."""
        return self.count * self.devices

    def __str__(self) -> str:
        """Return the value of `--nodes`, such as `4x8`."""
        return f"{self.count}x{self.devices}"


def are_on_different_nodes(rank: int, other: int, node_devices: int) -> bool:
    """Return True if two ranks are on different nodes of `node_devices` devices each.

    Args:
        rank: Rank of one process; ranks are numbered node by node.
        other: Rank of the other process.
        node_devices: Devices per node.
    """
    return rank // node_devices != other // node_devices
