"""Run report (`run.json`): the measurements of a training run under a plan."""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.values.left_out import LEFT_OUT
from planner.core.values.profile import Device, Environment, WritingTool

RUN_SCHEMA: Final = "gpipe-plan/run/v1"

LEAST_CORE_SHARE: Final = 0.6
"""Smallest share of its requested CPU time that a process must get for its times to be used.

Measured shares of two processes on two cores: 0.78 to 0.93; with six other processes, 0.08 to 0.19.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Measurements of one stage, per micro-batch unless stated otherwise.

    Times are means over the steps after the warm-up, without the fastest and the slowest quarter of these steps.
    """

    index: int
    replica: int = field(default=0, metadata=LEFT_OUT)
    """Index of the pipeline to which the stage belongs."""
    first: str
    last: str
    forward_us: float
    backward_us: float
    """Backward time, including recomputation."""
    backward_input_us: float = field(default=0.0, metadata=LEFT_OUT)
    """Time of the input-gradient pass (I), including recomputation; 0 without split backwards."""
    backward_weight_us: float = field(default=0.0, metadata=LEFT_OUT)
    """Time of the weight-gradient pass. Both passes of a split backward need not add up to `backward_us`."""
    recompute_us: float = 0.0
    """Part of `backward_us` that recomputed activations."""
    transfer_us: float = 0.0
    """Time per step that the stage waited for transfers after the sender had finished computing the data."""
    idle_us: float = 0.0
    """Time per step that the device waited for data that the sender was still computing; equal for all its stages."""
    parameter_bytes: int
    peak_bytes: int
    """Largest memory that the device's allocator had allocated during a step; equal for all stages of a device."""
    outside_bytes: int = field(default=0, metadata=LEFT_OUT)
    """Memory in use on the device outside allocated tensors (context, libraries, allocator slack); 0 except on CUDA."""
    core_share: float = field(default=0.0, metadata=LEFT_OUT)
    """CPU time that the process got, divided by the CPU time that it could have used; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryRun:
    """Mean time to move one micro-batch over a boundary, as measured by the receiver."""

    index: int
    """Index of the stage before the boundary."""
    replica: int = field(default=0, metadata=LEFT_OUT)
    forward_us: float
    backward_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Report of one run of the bundled executor."""

    schema: Literal["gpipe-plan/run/v1"] = RUN_SCHEMA
    generator: WritingTool | None = None
    plan_digest: str
    """Digest of the plan's decisions: schedule, micro-batches, balance, recompute."""
    seed: int | None = None
    device: Device
    environment: Environment = field(default_factory=Environment)
    losses: tuple[float, ...]
    """Mean loss over the mini-batch, one per step."""
    step_us: tuple[float, ...]
    """Time of each step, measured on the process with the first stage."""
    batch: int = field(default=0, metadata=LEFT_OUT)
    """Planned samples per step, over all replicas; 0 if unknown."""
    samples_per_s: tuple[float, ...] = ()
    """Samples per second of each step, from its actual number of samples."""
    bubble: float | None = None
    """Share of the time from the first forward to the last backward in which devices wait; median over steps."""
    overhead_us: float | None = None
    """Median time that the engine itself takes before a forward or backward that receives no message."""
    warmup_steps: int
    """Number of warm-up steps, whose times are not in `stages`. Memory peaks were measured in the last of them."""
    stages: tuple[StageRun, ...]
    """Stages of one pipeline in order, then those of the next pipeline."""
    boundaries: tuple[BoundaryRun, ...] = ()
    """Boundaries between processes, of one pipeline in order, then those of the next pipeline."""
