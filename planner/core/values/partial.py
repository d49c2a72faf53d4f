"""Interrupted profile: finished measurements, which the same command reuses when it is repeated."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from planner.core.values.profile import Device, Environment, MemoryDetail, Model, SplitMemory, WritingTool

PARTIAL_SCHEMA: Final = "gpipe-plan/partial/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurements of one layer at one micro-batch size."""

    digest: str
    """Digest of the layer's operators and shapes (`LayerProfile.digest`)."""
    micro_batch_size: int
    memory: MemoryDetail
    split: SplitMemory | None = None
    """Memory record of the layer's split backward."""
    forward_us: tuple[float, ...] = ()
    """Forward times, one per repeat."""
    backward_us: tuple[float, ...] = ()
    backward_input_us: tuple[float, ...] = ()
    """Time of the forward plus the input-gradient pass, for each repeat with a split backward."""
    backward_weight_us: tuple[float, ...] = ()
    """Time of the weight-gradient pass, for each repeat with a split backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialProfile:
    """Measurements of an interrupted profile, with the settings that must be equal to reuse them."""

    schema: Literal["gpipe-plan/partial/v1"] = PARTIAL_SCHEMA
    generator: WritingTool
    model: Model
    device: Device
    environment: Environment
    optimizer: str
    measurements: tuple[Measurement, ...]

    def differences(self, other: "PartialProfile") -> list[str]:
        """Return the names of the settings in which this profile and `other` differ."""
        names = ("generator", "model", "device", "environment", "optimizer")
        # Memory that other programs hold on the device changes no measurement.
        a, b = (replace(one, device=replace(one.device, reserve_bytes=0)) for one in (self, other))
        return [name for name in names if getattr(a, name) != getattr(b, name)]
