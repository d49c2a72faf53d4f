"""What the plan has to run on: devices in pipeline order, their memory, and the links between neighbours."""

from dataclasses import dataclass, field

__all__ = ["Cluster", "ExecutorCost", "Link"]


_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One connection between neighbouring stages, the same in both directions at once (full duplex).

    `blocking` links keep the receiving stage busy for the whole transfer, as gloo on CPUs does; others overlap
    with compute. The default link costs nothing.
    """

    __pydantic_config__ = _FORBID
    latency_us: float = 0.0
    bytes_per_s: float = 0.0
    """0 means unlimited."""
    blocking: bool = False

    def transfer_us(self, size_bytes: float) -> float:
        """Time to move `size_bytes` once, in microseconds: latency + size / bandwidth."""
        if self.bytes_per_s == 0:
            return self.latency_us
        return self.latency_us + size_bytes / self.bytes_per_s * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCost:
    """What the bundled executor itself costs on a machine."""

    __pydantic_config__ = _FORBID
    overhead_us: float
    """Per micro-batch, stage and direction."""
    link: Link
    """Between two processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one pipeline. `memory_bytes[k]` is the cap of the device that runs stage k."""

    memory_bytes: tuple[int, ...]
    link: Link = field(default_factory=Link)
    reserve_bytes: int = 0
    """Context, libraries and allocator slack on every device; counted inside the cap."""
    overhead_us: float = 0.0
    """The executor's own time per micro-batch, stage and direction."""

    @property
    def num_devices(self) -> int:
        """K at most."""
        return len(self.memory_bytes)
