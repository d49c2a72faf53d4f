"""The plan: which stage runs which layers, with how many micro-batches, and what that is predicted to cost.

These are the values behind `plan.yaml`; `docs/file-formats.md` describes every field. `inputs` is what was asked,
`schedule`, `micro_batches`, `balance` and `stages[].recompute` are the answer, everything else is derived from
the profile and never trusted when a plan is read back.
"""

from dataclasses import dataclass, field, fields
from typing import Final, Literal

from planner.core.values.cluster import Cluster, Link
from planner.core.values.placement import Placement, device_of, stages_on
from planner.core.values.precision import Precision
from planner.core.values.profile import Generator

PLAN_SCHEMA: Final = "gpipe-plan/plan/v1"

Recompute = Literal["never", "except-last", "always", "layers"]
"""On which micro-batches a stage drops its activations and computes them again in backward.

`layers`: on every micro-batch, but only those of the layers that `Stage.recomputed` names, each on its own.
"""

RecomputePolicy = Literal["auto", "never", "except-last", "always", "layers"]
"""What the user allows; `auto` lets the solver choose stage by stage, `layers` layer by layer as well."""

ScheduleName = str
"""One of `planner.core.schedule.SCHEDULES`, or `auto` where it says what the user allows: the fastest that fits."""

DEFAULT_SCHEDULE: Final[ScheduleName] = "auto"
"""What is asked where nothing else is: of `solve`, `sweep` and the functions behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReference:
    """The profile a plan was made from."""

    path: str
    digest: str
    how: Literal["measured", "compiled", "estimated"] = "measured"
    """Where the profile's numbers come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What was asked, with every option resolved."""

    profile: ProfileReference
    model_digest: str = ""
    devices: int
    """How many devices all replicas have together."""
    memory_bytes: tuple[int, ...]
    """Cap of each device, in pipeline order."""
    speeds: tuple[float, ...] = ()
    """How many times faster than the profiled device each device is; empty where all are as fast as it."""
    compute: float = 1.0
    """How many times what was profiled all computing takes: from a calibration."""
    step_ratio: float | None = None
    """The step of the run that the calibration is of, measured over predicted with it; None without one."""
    batch: int
    """Mini-batch: samples per optimizer step, over all replicas."""
    link: Link = field(default_factory=Link)
    inter_link: Link | None = None
    """Between nodes, where it differs from `link`, which then is the one within a node."""
    node_devices: int = 0
    """Devices per node; 0 where all are in one."""
    links: tuple[Link, ...] = ()
    """The one behind every device but the last, where each was measured; `link` and nodes do not count then."""
    allreduce: Link | None = None
    """What replicas sum their gradients over; None where that costs nothing."""
    reserve_bytes: int = 0
    overhead_us: float = 0.0
    schedule: ScheduleName = "gpipe"
    """What the user allows."""
    chunks: int = 1
    """Stages per device, where the schedule may have several; 0 lets the solver choose."""
    replicas: int = 1
    """Pipelines side by side; 0 lets the solver choose."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must be in one stage."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of layers of which no two may be in one stage."""
    any_order: bool = False
    """Whether devices may be put into any order."""
    recompute: RecomputePolicy = "auto"
    optimizer: str = ""
    dtype: Precision = ""
    """What `profile --dtype` asked for; empty where the model runs as it is built."""
    min_micro_batch: int = 1
    """Least samples of a micro-batch."""
    extrapolate: bool = False
    """Whether micro-batch sizes outside the profiled range were allowed."""

    @property
    def cluster(self) -> Cluster:
        """Devices and links that the plan is for."""
        return Cluster(**{each.name: getattr(self, each.name) for each in fields(Cluster)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How good the answer is, and how that is known."""

    method: str
    status: Literal["optimal", "feasible", "given"]
    """`given`: the cuts came from the user and were only evaluated."""
    gap: float = 0.0
    """(step time - lower bound) / step time."""
    lower_bound_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak memory of one stage over a step, in bytes, itemised at the moment of the peak."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    casts: int = 0
    """Low-precision copies of weights, which autocast keeps while the schedule runs."""
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

    index: int
    device: int | None = None
    """Index into `Inputs.memory_bytes`; None where it is the usual one: `index`, modulo K."""
    first: str
    last: str
    layers: int
    recompute: Recompute
    recomputed: tuple[str, ...] = ()
    """The layers that are recomputed, where `recompute` is `layers`."""
    forward_us: float
    backward_us: float
    """Recomputation included."""
    backward_weight_us: float = 0.0
    """How much of `backward_us` is W, where backwards come in halves."""
    memory: StageMemory
    """The stage's peak; where it shares its device with other chunks, its part of the device's peak."""
    memory_bytes: int
    """The cap of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the cost model says of a whole step."""

    step_us: float
    samples_per_s: float
    bubble: float
    """Share of device time spent idle between the first forward and the last backward."""
    ideal_bubble: float
    """(K-1)/(V M+K-1): what equal stages would have; 0 where backwards come in halves, which may waste nothing."""
    imbalance: float
    """Largest over mean forward + backward time of a stage."""
    recompute_share: float
    """Share of compute time spent computing activations again."""
    bottleneck_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The best plan with one number of micro-batches (and of replicas)."""

    micro_batches: int
    micro_batch_size: int
    replicas: int = 1
    fits: bool = True
    """Whether there is a plan at all; if not, the figures are 0."""
    schedule: ScheduleName = "gpipe"
    devices: int = 0
    """K of that plan."""
    step_us: float = 0.0
    samples_per_s: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    """Predicted peak of the device that needs most."""
    recompute_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What one change of the devices would bring: the best plan then."""

    change: str
    step_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What errors of measurement do to the plan, from profiles drawn around the measured one."""

    draws: int
    spread: float
    """Median over layers of the relative half-width of the 95 % interval."""
    mean_regret: float
    """By how much the plan is slower than the best plan of a drawn profile, under that profile."""
    worst_regret: float
    same_plan: float
    """Share of the draws of which no plan was found that beats these cuts and M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """Why the plan is as it is, and what would change it."""

    pace: str
    """What sets the pace: a stage's forward and backward, or a link."""
    tightest_device: int
    free_bytes: int
    """Below the cap of that device."""
    what_if: tuple[WhatIf, ...] = ()
    noise: Noise | None = None
    """What errors of measurement do; None where the profile has no spread."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """A partition of the chain into stages, with its schedule and predictions."""

    schema: Literal["gpipe-plan/plan/v1"] = PLAN_SCHEMA
    generator: Generator | None = None
    inputs: Inputs
    solver: SolverReport
    schedule: ScheduleName
    chunks: int = 1
    """V: stages per device."""
    placement: Placement = "loop"
    """Which stages these are."""
    replicas: int = 1
    """R: pipelines side by side, each with batch/R samples."""
    micro_batches: int
    """M, of each pipeline."""
    micro_batch_size: int
    order: tuple[str, ...] = ()
    """Per device of a pipeline what it does, one thing after the other, where the schedule was made for this plan."""
    balance: tuple[int, ...]
    stages: tuple[Stage, ...]
    predicted: Predicted
    frontier: tuple[FrontierPoint, ...] = ()
    """The trade-off over M, where it was asked for."""
    schedules: tuple[FrontierPoint, ...] = ()
    """What each schedule would give, where that was asked for; without a plan, `fits` is false."""
    insight: Insight | None = None
    """An explanation, where it was asked for."""

    def __repr__(self) -> str:
        """Return the decisions and the predicted step time in one line."""
        size, step_us, status = self.micro_batch_size, self.predicted.step_us, self.solver.status
        return (
            f"Plan(schedule={self.schedule!r}, stages={len(self.balance)}, replicas={self.replicas}, "
            f"micro_batches={self.micro_batches}, micro_batch_size={size}, step_us={step_us:.6g}, status={status!r})"
        )

    @property
    def num_devices(self) -> int:
        """K: devices of one pipeline."""
        return len(self.balance) // self.chunks

    def device_of(self, stage: Stage) -> int:
        """Index into `Inputs.memory_bytes` of the device that runs `stage`."""
        return device_of(stage.index, self.num_devices, self.placement) if stage.device is None else stage.device

    def chunks_of(self, device: int) -> tuple[Stage, ...]:
        """The stages that `device` of a pipeline, counted in pipeline order, runs."""
        return tuple(self.stages[s] for s in stages_on(device, self.num_devices, self.chunks, self.placement))

    def by_device(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of every device of one pipeline, in pipeline order."""
        return tuple(self.chunks_of(device) for device in range(self.num_devices))

    def device_bytes(self) -> tuple[int, ...]:
        """Peak memory of every device of one pipeline, in pipeline order."""
        return tuple(sum(stage.memory.total for stage in chunks) for chunks in self.by_device())
