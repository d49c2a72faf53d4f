"""Calibration: costs of a machine, measured by a run of a plan. These are the values behind `calibration.yaml`.

`docs/file-formats.md` describes every field; `planner.core.judge.calibration` computes the values from a run.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.values.cluster import Link
from planner.core.values.profile import Device, Environment, Generator

CALIBRATION_SCHEMA: Final = "gpipe-plan/calibration/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured costs that replace those of a profile in predictions."""

    schema: Literal["gpipe-plan/calibration/v1"] = CALIBRATION_SCHEMA
    generator: Generator | None = None
    plan_digest: str = ""
    """Digest of the plan that was run, as in the run report."""
    steps: int = 0
    """Number of measured steps, without warm-up."""
    device: Device
    environment: Environment = field(default_factory=Environment)
    compute: float = 1.0
    """Ratio of measured to profiled forward and backward time, mostly due to other devices of the same machine."""
    overhead_us: float
    """Executor time per micro-batch, stage and direction."""
    link: Link | None = None
    """Link between neighbors; None if nothing was sent, or if links were measured one by one."""
    reserve_bytes: int
    """Memory that a device needs in addition to what the plan counts."""
    step_ratio: float | None = None
    """Measured step time over the step time predicted with this calibration; None if not compared."""
