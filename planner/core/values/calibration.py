"""What a run of a plan measured of a machine, to predict with: the values behind `calibration.yaml`.

`docs/file-formats.md` describes every field; `planner.core.judge.calibration` makes such a value of a run.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.values.cluster import Link
from planner.core.values.profile import Device, Environment, Generator

CALIBRATION_SCHEMA: Final = "gpipe-plan/calibration/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What to predict with instead of what a profile brings."""

    schema: Literal["gpipe-plan/calibration/v1"] = CALIBRATION_SCHEMA
    generator: Generator | None = None
    plan_digest: str = ""
    """Of the plan that was run, as in the run report."""
    steps: int = 0
    """Measured, warm-up not counted."""
    device: Device
    environment: Environment = field(default_factory=Environment)
    compute: float = 1.0
    """Forward and backward over what the profile says: what neighbours on the same machine cost, mostly."""
    overhead_us: float
    """The executor's own time per micro-batch, stage and direction."""
    link: Link | None = None
    """Between neighbours; None where nothing was sent, or where links were measured one by one."""
    reserve_bytes: int
    """What a device needs beside what the plan counts."""
    step_ratio: float | None = None
    """The step of the run over that predicted of it with all of this: what came true; None where nobody has looked."""
