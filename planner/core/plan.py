"""The plan: which stage runs which layers, with how many micro-batches, and what that is predicted to cost.

These are the values behind `plan.yaml`; `docs/file-formats.md` describes every field. `inputs` is what was asked,
`schedule`, `micro_batches`, `balance` and `stages[].recompute` are the answer, everything else is derived from
the profile and never trusted when a plan is read back.
"""

from dataclasses import dataclass, field, fields
from typing import Final, Literal

from planner.core.cluster import Link
from planner.core.profile import Generator

__all__ = [
    "PLAN_SCHEMA",
    "Inputs",
    "Plan",
    "Predicted",
    "ProfileReference",
    "Recompute",
    "RecomputePolicy",
    "Schedule",
    "SolverReport",
    "Stage",
    "StageMemory",
]

PLAN_SCHEMA: Final = "gpipe-plan/plan/v1"

Recompute = Literal["never", "except-last", "always"]
"""On which micro-batches a stage drops its activations and computes them again in backward."""

RecomputePolicy = Literal["auto", "never", "except-last", "always"]
"""What the user allows; `auto` lets the solver choose stage by stage."""

Schedule = Literal["gpipe", "1f1b"]

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReference:
    """The profile a plan was made from."""

    __pydantic_config__ = _FORBID
    path: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What was asked, with every option resolved."""

    __pydantic_config__ = _FORBID
    profile: ProfileReference
    model_digest: str = ""
    devices: int
    memory_bytes: tuple[int, ...]
    """Cap of each device, in pipeline order."""
    batch: int
    """Mini-batch: samples per optimizer step."""
    link: Link = field(default_factory=Link)
    reserve_bytes: int = 0
    overhead_us: float = 0.0
    schedule: Schedule = "gpipe"
    recompute: RecomputePolicy = "auto"
    optimizer: str = ""
    extrapolate: bool = False
    """Whether micro-batch sizes outside the profiled range were allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How good the answer is, and how that is known."""

    __pydantic_config__ = _FORBID
    method: str
    status: Literal["optimal", "feasible", "given"]
    """`given`: the cuts came from the user and were only evaluated."""
    gap: float = 0.0
    """(step time - lower bound) / step time."""
    lower_bound_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak memory of one stage over a step, in bytes, itemised at the moment of the peak."""

    __pydantic_config__ = _FORBID
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    in_flight: int = 0
    """Inputs, outputs and saved activations of the micro-batches waiting for their backward."""
    transfer: int = 0
    """Buffers of the engine: gradients being received or sent."""
    working: int = 0
    """The micro-batch being computed: what it saves (again) and its transient peak, or the optimizer's step."""
    reserve: int = 0
    total: int = 0

    @classmethod
    def of(cls, **items: int) -> "StageMemory":
        """The sum of `items`, itemised."""
        return cls(**items, total=sum(items.values()))

    def items(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of every item, the total left out."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: layers `first` to `last` of the chain on one device. Times are for one micro-batch."""

    __pydantic_config__ = _FORBID
    index: int
    first: str
    last: str
    layers: int
    recompute: Recompute
    forward_us: float
    backward_us: float
    """Recomputation included."""
    memory: StageMemory
    memory_bytes: int
    """The cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the cost model says of a whole step."""

    __pydantic_config__ = _FORBID
    step_us: float
    samples_per_s: float
    bubble: float
    """Share of device time spent idle between the first forward and the last backward."""
    ideal_bubble: float
    """(K-1)/(M+K-1): what equal stages would have."""
    imbalance: float
    """Largest over mean forward + backward time of a stage."""
    recompute_share: float
    """Share of compute time spent computing activations again."""
    bottleneck_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A partition of the chain into stages, with its schedule and predictions."""

    __pydantic_config__ = _FORBID
    schema: Literal["gpipe-plan/plan/v1"] = PLAN_SCHEMA
    generator: Generator | None = None
    inputs: Inputs
    solver: SolverReport
    schedule: Schedule
    micro_batches: int
    micro_batch_size: int
    balance: tuple[int, ...]
    stages: tuple[Stage, ...]
    predicted: Predicted
