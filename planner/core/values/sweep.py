"""Sweep: the best plan for every number of devices and every memory limit."""

from dataclasses import dataclass
from typing import Literal

from planner.core.values.plan import Plan, ProfileReference, TrainingRunEstimate
from planner.core.values.units import exact_bytes_option


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """Best plan for one number of devices and one memory limit."""

    devices: int
    memory_bytes: int
    """Memory of a device, as requested. In the plan's inputs, this value is reduced by the headroom."""
    status: Literal["optimal", "feasible", "none", "unknown"]
    """Result. `none`: it is proven that no plan fits; `unknown`: the search found no plan, which proves nothing."""
    samples_per_device_s: float = 0.0
    """Samples per second and device, counting unused devices."""
    training: TrainingRunEstimate | None = None
    """Training run on all devices, if its length or the price of a GPU-hour was given."""
    plan: Plan | None = None

    @property
    def file_name(self) -> str:
        """Name of the cell's plan file: `8x24GB.yaml`."""
        return f"{self.devices}x{exact_bytes_option(self.memory_bytes)}.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Best plan for every number of devices and every memory limit. In `cells`, the memory limit varies fastest."""

    schema: Literal["gpipe-plan/sweep/v1"] = "gpipe-plan/sweep/v1"
    profile: ProfileReference
    batch: int
    devices: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    cells: tuple[SweepCell, ...]
    smallest: int | None = None
    """Index in `cells` of the smallest plan: fewest devices; for equal numbers of devices, least memory."""

    cheapest: int | None = None
    """Index in `cells` of the plan with the fewest device-hours per sample, counting unused devices."""

    def cell(self, devices: int, memory_bytes: int) -> SweepCell:
        """Return the cell of one number of devices and one memory size."""
        return self.cells[self.devices.index(devices) * len(self.memory_bytes) + self.memory_bytes.index(memory_bytes)]
