"""Memory of every device by component, compared with the device's limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.core.values.plan import Stage, StageMemory
from planner.core.values.units import format_bytes
from planner.show.views.numbers import NOTHING, percent, row_noun

COMPONENTS = tuple(name for name, _ in StageMemory().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory that one device needs, and its memory limit."""

    label: str
    memory: StageMemory
    limit_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.memory.total

    @property
    def is_over(self) -> bool:
        return self.total_bytes > self.limit_bytes

    @property
    def share(self) -> str:
        """Needed memory in percent of the limit."""
        return share_of_limit(self.total_bytes, self.limit_bytes)

    @property
    def need_of_limit(self) -> str:
        """Needed memory and limit, as `12.4 GiB of 16.0 GiB`."""
        return f"{format_bytes(self.total_bytes)} of {format_bytes(self.limit_bytes)}"


def device_memory(devices: Sequence[Sequence[Stage]]) -> tuple[DeviceMemory, ...]:
    """Return the memory that every device needs: the sum over its stages."""
    noun = row_noun(len(devices[0]))
    return tuple(
        DeviceMemory(label=f"{noun} {device}", memory=_sum(chunks), limit_bytes=chunks[0].memory_bytes)
        for device, chunks in enumerate(devices)
    )


def fullest_device(devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """Return the device that is nearest to its limit."""
    return max(devices, key=lambda device: device.total_bytes / max(1, device.limit_bytes))


def present_components(devices: Sequence[DeviceMemory]) -> tuple[str, ...]:
    """Return the names of the memory components that at least one device needs."""
    return tuple(kind for kind in COMPONENTS if any(getattr(device.memory, kind) for device in devices))


def component_title(kind: str) -> str:
    """Return the name of a memory component in words."""
    return kind.replace("_", " ")


def share_of_limit(need_bytes: int, limit_bytes: int) -> str:
    """Return the needed memory in percent of the limit; `-` without a limit."""
    return percent(need_bytes / limit_bytes, decimals=0) if limit_bytes else NOTHING


def _sum(chunks: Sequence[Stage]) -> StageMemory:
    return StageMemory(
        **{name: sum(getattr(chunk.memory, name) for chunk in chunks) for name in (*COMPONENTS, "total")}
    )
