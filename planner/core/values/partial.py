"""An interrupted profile: what had been measured by then, so that the same command can go on from there.

These are the values behind `profile.yaml.partial`; `docs/file-formats.md` describes every field.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from planner.core.values.profile import Device, Environment, Generator, MemoryDetail, Model, SplitMemory

PARTIAL_SCHEMA: Final = "gpipe-plan/partial/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is known of one layer at one micro-batch size."""

    digest: str
    """The layer's."""
    micro_batch_size: int
    memory: MemoryDetail
    split: SplitMemory | None = None
    """The record of its backward in halves."""
    forward_us: tuple[float, ...] = ()
    """One per repeat."""
    backward_us: tuple[float, ...] = ()
    backward_input_us: tuple[float, ...] = ()
    """One per repeat that ran the backward in halves: forward and I together."""
    backward_weight_us: tuple[float, ...] = ()
    """W of the same repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Measurements, and all that must be the same for them to be of use."""

    schema: Literal["gpipe-plan/partial/v1"] = PARTIAL_SCHEMA
    generator: Generator
    model: Model
    device: Device
    environment: Environment
    optimizer: str
    measurements: tuple[Measurement, ...]

    def differences(self, other: "Partial") -> list[str]:
        """Names of what makes the measurements of one useless for the other."""
        names = ("generator", "model", "device", "environment", "optimizer")
        # What other programs hold of the device at the moment changes no measurement.
        a, b = (replace(one, device=replace(one.device, reserve_bytes=0)) for one in (self, other))
        return [name for name in names if getattr(a, name) != getattr(b, name)]
