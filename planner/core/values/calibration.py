"""Calibration (`calibration.yaml`): costs of a machine, measured by a run of a plan.

`docs/file-formats.md` describes every field; `planner.core.judge.calibration` computes the values from a run.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.values.cluster import Link
from planner.core.values.profile import Device, Environment, WritingTool

CALIBRATION_SCHEMA: Final = "gpipe-plan/calibration/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs of a machine, measured by a run. Predictions use them instead of the profile's costs."""

    schema: Literal["gpipe-plan/calibration/v1"] = CALIBRATION_SCHEMA
    generator: WritingTool | None = None
    plan_digest: str = ""
    """Digest of the plan that was run, as in the run report."""
    steps: int = 0
    """Number of measured steps, without warm-up."""
    device: Device
    environment: Environment = field(default_factory=Environment)
    compute: float = 1.0
    """Ratio of measured to profiled forward and backward time; above 1 if devices share a machine."""
    overhead_us: float
    """Time of the executor itself per micro-batch, stage and direction (forward or backward)."""
    link: Link | None = None
    """Link between neighbors; None if nothing was sent, or if the plan has several links."""
    reserve_bytes: int
    """Memory that a device used in addition to its predicted peak; largest value of all devices."""
    step_ratio: float | None = None
    """Ratio of the measured step time to the step time predicted with this calibration; None if not compared."""
