"""The capacity question: the best plan for every number of devices and every cap, and the smallest that trains."""

from dataclasses import dataclass
from typing import Literal

from planner.core.values.plan import Plan, ProfileReference
from planner.core.values.units import exact_bytes_option


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """The best plan for so many devices with so much memory."""

    devices: int
    memory_bytes: int
    """What was asked for; what the plan may use of it is in its inputs (headroom)."""
    status: Literal["optimal", "feasible", "none", "unknown"]
    """`none`: proven that nothing fits; `unknown`: the time limit came before a plan."""
    samples_per_device_s: float = 0.0
    """Samples per second and device, unused ones counted."""
    plan: Plan | None = None

    @property
    def file_name(self) -> str:
        """What its plan is called where all are written: `8x24GB.yaml`."""
        return f"{self.devices}x{exact_bytes_option(self.memory_bytes)}.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Every combination of `devices` and `memory_bytes`, in that order."""

    schema: Literal["gpipe-plan/sweep/v1"] = "gpipe-plan/sweep/v1"
    profile: ProfileReference
    batch: int
    devices: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    cells: tuple[SweepCell, ...]
    smallest: int | None = None
    """Which of `cells` has the fewest devices for which there is a plan, and of these the least memory."""

    def cell(self, devices: int, memory_bytes: int) -> SweepCell:
        """The cell of so many devices with so much memory."""
        return self.cells[self.devices.index(devices) * len(self.memory_bytes) + self.memory_bytes.index(memory_bytes)]
