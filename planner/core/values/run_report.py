"""The run report: what a training run under a plan really took. These are the values behind `run.json`."""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.values.profile import Device, Environment, Generator

RUN_SCHEMA: Final = "gpipe-plan/run/v1"

LEAST_CORE_SHARE: Final = 0.6
"""How much of the time that it wants to a process must run, or its times say nothing.

Two on two cores had 0.78 to 0.93, as what moves their messages runs there, too; beside six others 0.08 to 0.19.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What one stage took. Times are means over the middle of the last steps: of one micro-batch, waiting of a step."""

    index: int
    replica: int = 0
    """Which of the pipelines side by side."""
    first: str
    last: str
    forward_us: float
    backward_us: float
    """Recomputation included."""
    backward_input_us: float = 0.0
    """I of a backward in halves, recomputation included; 0 where no backward came so."""
    backward_weight_us: float = 0.0
    """W, likewise; the sum need not be `backward_us`."""
    recompute_us: float = 0.0
    """How much of `backward_us` was computing activations again."""
    transfer_us: float = 0.0
    """Per step: waiting for what its sender had ready."""
    idle_us: float = 0.0
    """Per step: waiting for what was not ready yet; the same for all stages of a device."""
    parameter_bytes: int
    peak_bytes: int
    """Highest allocation during a step, by the device's allocator; the same for all stages of a device."""
    outside_bytes: int = 0
    """What the device had in use beside that: context, libraries, the allocator's slack; known on CUDA."""
    core_share: float = 0.0
    """How much of the time that it wanted to its process ran, as others had its core; 0 where not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryRun:
    """What moving one micro-batch over a boundary took, as the receiver felt it: a mean."""

    index: int
    """The stage in front of it."""
    replica: int = 0
    forward_us: float
    backward_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run of the bundled executor."""

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
    batch: int = 0
    """Samples per step as planned, over all replicas; 0: not known."""
    samples_per_s: tuple[float, ...] = ()
    """One per step, of the samples that it had."""
    bubble: float | None = None
    """Share of device time spent waiting between first forward and last backward; median over the last steps."""
    overhead_us: float | None = None
    """The engine's own time before a forward or backward that received nothing; median."""
    warmup_steps: int
    """The first steps also read memory, and are left out of the times per stage."""
    stages: tuple[StageRun, ...]
    """The stages of one pipeline in order, then the next pipeline's."""
    boundaries: tuple[BoundaryRun, ...] = ()
    """Between processes, in the same order."""
