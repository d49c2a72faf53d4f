"""Plan: the layers of each stage, the number of micro-batches, and the predicted costs.

The values are stored in `plan.yaml`; `docs/file-formats.md` describes every field. `inputs` is the request. `schedule`,
`micro_batches`, `balance` and `stages[].recompute` are the result. Everything else is derived from the profile and is
recomputed when a plan is read.
"""

from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any, Final, Literal

from planner.core.values.cluster import Cluster, Link
from planner.core.values.left_out import LEFT_OUT
from planner.core.values.placement import Placement, device_of, stages_on
from planner.core.values.precision import Precision
from planner.core.values.profile import WritingTool

PLAN_SCHEMA: Final = "gpipe-plan/plan/v1"

Recompute = Literal["never", "except-last", "always", "layers"]
"""Micro-batches whose activations a stage drops in forward and recomputes in backward.

`layers`: all micro-batches, but only the layers in `Stage.recomputed`, each separately.
"""

RecomputePolicy = Literal["auto", "never", "except-last", "always", "layers"]
"""Allowed recomputation. With `auto` the solver chooses for each stage, with `layers` also for each layer."""

ScheduleName = str
"""Name in `planner.core.schedule.SCHEDULES`, or `auto` in a request: the fastest schedule that fits."""

DEFAULT_SCHEDULE: Final[ScheduleName] = "auto"
"""Schedule that `solve`, `sweep` and their functions use by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReference:
    """Profile that a plan was made from."""

    path: str
    digest: str
    how: Literal["measured", "compiled", "estimated"] = field(default="measured", metadata=LEFT_OUT)
    """Origin of the profile's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Request to the solver for which a plan was made, with a value for every option."""

    profile: ProfileReference
    model_digest: str = ""
    devices: int
    """Number of available devices, for all replicas together. Each GPU of a tensor-parallel group counts."""
    memory_bytes: tuple[int, ...]
    """Memory limit of each of the `devices`, replica by replica, in pipeline order."""
    speeds: tuple[float, ...] = ()
    """Speed of each device relative to the profiled device; empty if all devices are as fast as the profiled one."""
    compute: float = field(default=1.0, metadata=LEFT_OUT)
    """Ratio of measured to profiled compute time, from a calibration."""
    step_ratio: float | None = None
    """Ratio of measured to predicted step time, from a calibration; None without a calibration."""
    batch: int
    """Samples per optimizer step (mini-batch), over all replicas."""
    link: Link = field(default_factory=Link)
    inter_link: Link | None = None
    """Link between nodes, if it differs from the link within a node, which is `link`."""
    node_devices: int = field(default=0, metadata=LEFT_OUT)
    """Devices per node; 0 if all are in one node."""
    links: tuple[Link, ...] = ()
    """Link from every device to the next, if each was measured; replaces `link`, `inter_link` and `node_devices`."""
    allreduce: Link | None = None
    """Link over which replicas sum their gradients; None if the sums take no time."""
    reserve_bytes: int = 0
    headroom: float = field(default=0.0, metadata=LEFT_OUT)
    """Share of each device's memory that stays free; `memory_bytes` is the memory without this share."""
    overhead_us: float = 0.0
    schedule: ScheduleName = "gpipe"
    """Schedule that the user allows."""
    chunks: int = field(default=1, metadata=LEFT_OUT)
    """Stages per device, if the schedule allows several; 0 lets the solver choose."""
    replicas: int = field(default=1, metadata=LEFT_OUT)
    """Number of pipelines that run in parallel; 0 lets the solver choose."""
    shard_optimizer: bool = field(default=False, metadata=LEFT_OUT)
    """True if each replica stores a part of the optimizer state and updates a part of the parameters (ZeRO stage 1)."""
    tensor_parallel: int = field(default=0, metadata=LEFT_OUT)
    """GPUs that share each layer; 0 lets the solver choose among the widths in the profile."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must be in one stage."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of layers; all layers of a group must be in different stages."""
    recompute: RecomputePolicy = "auto"
    optimizer: str = ""
    dtype: Precision = ""
    """Value of `profile --dtype`; empty if the model runs as it is built."""
    min_micro_batch: int = field(default=1, metadata=LEFT_OUT)
    """Smallest allowed number of samples in a micro-batch."""
    simplest: float = field(default=0.0, metadata=LEFT_OUT)
    """Share of the step time by which a plan with a simpler schedule may be slower than the fastest plan found."""
    extrapolate: bool = False
    """True if micro-batch sizes outside the profiled range are allowed."""
    tokens: int = field(default=0, metadata=LEFT_OUT)
    """Number of tokens of the whole training run; 0 if it was not given."""
    samples: int = field(default=0, metadata=LEFT_OUT)
    """Number of samples of the whole training run; 0 if it was not given."""
    price: float = field(default=0.0, metadata=LEFT_OUT)
    """Price of a GPU-hour, in any currency; 0 if it was not given."""

    def device_memory_for_limit(self, limit_bytes: int) -> int:
        """Return the memory that a device needs, in bytes: `limit_bytes` plus the free share `headroom`."""
        size = ceil(limit_bytes / (1 - self.headroom))
        return size if memory_limit_of_device(size, self.headroom) >= limit_bytes else size + 1

    @property
    def are_devices_alike(self) -> bool:
        """True if all devices have the same memory limit and speed."""
        return len(set(self.memory_bytes)) <= 1 and len(set(self.speeds)) <= 1

    @property
    def cluster(self) -> Cluster:
        """Cluster in which each GPU is a device of its own."""
        return self.cluster_of_groups(1)

    def cluster_of_groups(self, tensor_parallel: int, replicas: int = 1) -> Cluster:
        """Return the cluster in which each device is a group of `tensor_parallel` GPUs that share every layer.

        GPUs that fill no group are left out. If the optimizer is sharded, it is sharded over `replicas`.
        """
        count = self.devices // tensor_parallel
        groups: dict[str, Any] = {
            "memory_bytes": self.memory_bytes[:count],
            "speeds": self.speeds[:count],
            "node_devices": self.node_devices // tensor_parallel,
            "tensor_parallel": tensor_parallel,
            "optimizer_shards": replicas if self.shard_optimizer else 1,
        }
        same = {each.name: getattr(self, each.name) for each in fields(Cluster) if each.name not in groups}
        return Cluster(**same, **groups)


def memory_limit_of_device(device_bytes: int, headroom: float) -> int:
    """Return the memory limit of a device, in bytes: its memory without the share `headroom`, which stays free."""
    return int(device_bytes * (1 - headroom))


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """Quality of a plan: its status, lower bound and gap, and the method of the search."""

    method: str
    status: Literal["optimal", "feasible", "given"]
    """Status; `given`: the cuts came from the user and were only evaluated."""
    gap: float = 0.0
    """(step time - lower bound) / step time."""
    lower_bound_us: float = 0.0
    """Lower bound of the step time of all plans that the request allows."""
    named_lower_bound_us: float = field(default=0.0, metadata=LEFT_OUT)
    """Lower bound of the step time with named schedules (all except `search`), if above `lower_bound_us`; else 0."""

    def named_schedule_gap(self, step_us: float) -> float | None:
        """Return the gap between a step time and the lower bound of all plans with a named schedule.

        A named schedule is any schedule except `search`. The bound is `named_lower_bound_us`.

        Args:
            step_us: Step time in microseconds.

        Returns:
            (step time - bound) / step time, at least 0; None if there is no such bound.
        """
        return max(0.0, 1 - self.named_lower_bound_us / step_us) if self.named_lower_bound_us and step_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one stage at its peak within a step, in bytes, by component."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    casts: int = field(default=0, metadata=LEFT_OUT)
    """Low-precision copies of weights in autocast's weight cache, while the schedule runs."""
    in_flight: int = 0
    """Data of the mini-batch, and inputs, outputs and saved activations of the micro-batches in flight."""
    transfer: int = 0
    """Buffers of the engine: gradients being received or sent."""
    working: int = 0
    """Memory of the running forward or backward, or of the optimizer's step, that counts in no other component."""
    reserve: int = 0
    total: int = 0

    @classmethod
    def of(cls, **items: int) -> "StageMemory":
        """Return the memory with these components; `total` is computed as their sum."""
        return cls(**items, total=sum(items.values()))

    def items(self) -> tuple[tuple[str, int], ...]:
        """Return the name and the bytes of every memory component, without the total."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "total")


Item = str
"""Name of a component of `StageMemory`."""

ITEMS: Final[tuple[Item, ...]] = tuple(name for name, _ in StageMemory().items() if name != "reserve")
"""Memory components that are computed from the profile: all except `reserve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage with layers `first` to `last` on one device. Times are for one micro-batch."""

    index: int
    first: str
    last: str
    layers: int
    recompute: Recompute
    recomputed: tuple[str, ...] = ()
    """Layers that are recomputed, if `recompute` is `layers`."""
    forward_us: float
    backward_us: float
    """Backward time, including recomputation."""
    backward_weight_us: float = field(default=0.0, metadata=LEFT_OUT)
    """Part of `backward_us` that is the weight-gradient pass; 0 if backwards are not split."""
    memory: StageMemory
    """Peak of the stage; if several stages share a device, the stage's part of the device's peak."""
    memory_bytes: int
    """Memory limit of the device."""

    @property
    def backward_input_us(self) -> float:
        """Part of `backward_us` without the weight-gradient pass."""
        return self.backward_us - self.backward_weight_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions of the cost model for a whole step."""

    step_us: float
    samples_per_s: float
    tokens_per_s: float = field(default=0.0, metadata=LEFT_OUT)
    """Tokens per second; 0 if the number of tokens per sample is not known."""
    flops_utilization: float = field(default=0.0, metadata=LEFT_OUT)
    """Model FLOPs utilization of the GPUs that the plan uses; 0 if it is not known."""
    bubble: float
    """Share of device time spent idle between the first forward and the last backward."""
    ideal_bubble: float
    """Bubble of equal stages on K devices: (K-1)/(V M+K-1), with V stages per device and M micro-batches.

    0 if backwards are split, because weight-gradient passes can fill the bubble.
    """
    imbalance: float
    """Largest forward plus backward time of a device, divided by the mean over the devices."""
    recompute_share: float
    """Share of compute time spent recomputing activations."""
    bottleneck_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRunEstimate:
    """Predicted duration and cost of a training run on `gpus` GPUs, including unused ones."""

    gpus: int
    steps: int
    days: float
    gpu_hours: float
    cost: float | None = None
    """Cost in the currency of `Inputs.price`; None without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Figures of the best plan for one number of micro-batches and replicas, or for one schedule."""

    micro_batches: int
    micro_batch_size: int
    replicas: int = field(default=1, metadata=LEFT_OUT)
    tensor_parallel: int = field(default=1, metadata=LEFT_OUT)
    fits: bool = True
    """True if a plan that fits was found for this point; otherwise the figures of the plan are 0."""
    schedule: ScheduleName = "gpipe"
    devices: int = 0
    """Number of devices of each pipeline (K)."""
    step_us: float = 0.0
    samples_per_s: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    """Predicted peak memory of the device that needs most."""
    recompute_share: float = 0.0
    short_search: bool = field(default=False, metadata=LEFT_OUT)
    """True if the search was short, so that a longer one may find a faster plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Step time of the best plan after one change of the devices, such as more memory."""

    change: str
    step_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Effect of measurement errors on the plan, estimated with random profiles close to the measured one."""

    draws: int
    """Number of random profiles."""
    spread: float
    """Median of `LayerProfile.spread` over the layers."""
    mean_regret: float
    """Mean over the random profiles of (step time of this plan / step time of the best plan found) - 1."""
    worst_regret: float
    """Maximum over the random profiles of (step time of this plan / step time of the best plan found) - 1."""
    same_plan: float
    """Share of random profiles whose best plan found is no faster than this plan, or has its cuts and micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """Explanation of a plan: its bottleneck, the device with the least free memory, and possible improvements."""

    pace: str
    """Bottleneck of the step: the forward and backward of a stage, or a link."""
    tightest_device: int
    free_bytes: int
    """Memory that stays free below the limit of the tightest device."""
    what_if: tuple[WhatIf, ...] = ()
    noise: Noise | None = None
    """Effect of measurement errors; None if the profile has no spread."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Partition of the layers into stages, with schedule and predictions."""

    schema: Literal["gpipe-plan/plan/v1"] = PLAN_SCHEMA
    generator: WritingTool | None = None
    inputs: Inputs
    solver: SolverReport
    schedule: ScheduleName
    chunks: int = field(default=1, metadata=LEFT_OUT)
    """Number of stages per device (V)."""
    placement: Placement = field(default="loop", metadata=LEFT_OUT)
    """Placement of the stages on the devices."""
    replicas: int = field(default=1, metadata=LEFT_OUT)
    """Number of pipelines that run in parallel (R), each with batch/R samples."""
    tensor_parallel: int = field(default=1, metadata=LEFT_OUT)
    """Number of GPUs per device of the plan (T); they share each layer. All figures are for one of these GPUs."""
    micro_batches: int
    """Number of micro-batches per step of each pipeline (M)."""
    micro_batch_size: int
    order: tuple[str, ...] = ()
    """Actions of each device of a pipeline, in order, if the schedule was searched for this plan; else empty."""
    balance: tuple[int, ...]
    stages: tuple[Stage, ...]
    predicted: Predicted
    training: TrainingRunEstimate | None = None
    """Training run, if its length or the price of a GPU-hour was given."""
    frontier: tuple[FrontierPoint, ...] = ()
    """Figures of the best plan for each number of replicas and micro-batches, if requested."""
    schedules: tuple[FrontierPoint, ...] = ()
    """Best plan of each schedule, if requested; `fits` is false for a schedule without a plan."""
    insight: Insight | None = None
    """Explanation of the plan, if requested."""
    seal: str = field(default="", compare=False)
    """Digest of all other values, as `solve` returned them. If it is valid, `check` does not solve again."""

    def __repr__(self) -> str:
        """Return the decisions and the predicted step time in one line."""
        size, step_us, status = self.micro_batch_size, self.predicted.step_us, self.solver.status
        return (
            f"Plan(schedule={self.schedule!r}, stages={len(self.balance)}, replicas={self.replicas}, "
            f"micro_batches={self.micro_batches}, micro_batch_size={size}, step_us={step_us:.6g}, status={status!r})"
        )

    @property
    def num_devices(self) -> int:
        """Number of devices of one pipeline."""
        return len(self.balance) // self.chunks

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the plan uses: replicas times devices per replica times GPUs that share each layer."""
        return self.num_devices * self.replicas * self.tensor_parallel

    @property
    def cluster(self) -> Cluster:
        """Devices and links that the plan is for; each device is a group of `tensor_parallel` GPUs."""
        return self.inputs.cluster_of_groups(self.tensor_parallel, self.replicas)

    @property
    def shards_optimizer(self) -> bool:
        """True if replicas shard the optimizer: each has a part of the optimizer state."""
        return self.cluster.optimizer_shards > 1

    def device_of(self, stage: Stage) -> int:
        """Return the index, within its pipeline, of the device that runs `stage`."""
        return device_of(stage.index, self.num_devices, self.placement)

    def chunks_of(self, device: int) -> tuple[Stage, ...]:
        """Return the stages of the device with index `device` in a pipeline."""
        return tuple(self.stages[s] for s in stages_on(device, self.num_devices, self.chunks, self.placement))

    def by_device(self) -> tuple[tuple[Stage, ...], ...]:
        """Return the stages of every device of one pipeline, in pipeline order."""
        return tuple(self.chunks_of(device) for device in range(self.num_devices))

    def peak_bytes_by_device(self) -> tuple[int, ...]:
        """Return the peak memory of every device of one pipeline, in pipeline order."""
        return tuple(sum(stage.memory.total for stage in chunks) for chunks in self.by_device())
