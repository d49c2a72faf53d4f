"""Machines of several devices each, and which ranks of a job they hold: ranks are numbered node by node."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Machines that are alike."""

    count: int
    devices: int
    """Devices of each, or processes on it: there is one process per device."""

    @property
    def num_processes(self) -> int:
        """Processes on all of them together."""
        return self.count * self.devices

    def __str__(self) -> str:
        """`4x8`, as `--nodes` takes it."""
        return f"{self.count}x{self.devices}"


def are_apart(rank: int, other: int, node_devices: int) -> bool:
    """Whether two ranks are on different nodes of `node_devices` devices each."""
    return rank // node_devices != other // node_devices
