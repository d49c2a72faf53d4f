"""The run report: what a training run under a plan really took. These are the values behind `run.json`."""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.profile import Device, Environment, Generator

__all__ = ["RUN_SCHEMA", "RunReport", "StageRun"]

RUN_SCHEMA: Final = "gpipe-plan/run/v1"

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What one stage took, per micro-batch where it is a time."""

    __pydantic_config__ = _FORBID
    __quiet__ = frozenset({"replica"})
    index: int
    replica: int = 0
    """Which of the pipelines side by side."""
    first: str
    last: str
    forward_us: float
    """Median over the measured steps and micro-batches."""
    backward_us: float
    """Likewise; recomputation included."""
    parameter_bytes: int
    peak_bytes: int
    """Highest allocation during a step, by the device's allocator; the same for all stages of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run of the bundled executor."""

    __pydantic_config__ = _FORBID
    schema: Literal["gpipe-plan/run/v1"] = RUN_SCHEMA
    generator: Generator | None = None
    plan_digest: str
    """Digest of the plan's decisions: schedule, micro-batches, balance, recompute."""
    seed: int | None = None
    device: Device
    environment: Environment = field(default_factory=Environment)
    losses: tuple[float, ...]
    """Mean over the mini-batch, one per step."""
    step_us: tuple[float, ...]
    """One per step, first stage's clock."""
    warmup_steps: int
    """The first steps also read memory, and are left out of the times per stage."""
    stages: tuple[StageRun, ...]
    """Those of one pipeline in order, then the next pipeline's."""
