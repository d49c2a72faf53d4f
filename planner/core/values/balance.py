"""Balance configuration (`balance.yaml`): the part of a plan that the executor needs."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Literal

from planner.core.values.left_out import LEFT_OUT
from planner.core.values.placement import Placement, stages_on
from planner.core.values.plan import Inputs, Recompute, ScheduleName
from planner.core.values.precision import Precision
from planner.core.values.profile import Model, WritingTool
from planner.core.values.units import exact_bytes_option

BALANCE_SCHEMA: Final = "gpipe-plan/balance/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBalance:
    """Layers of one stage, by module path."""

    index: int
    recompute: Recompute
    layers: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    """Layers that are recomputed, each separately, if `recompute` is `layers`."""
    peak_bytes: int = 0
    """Predicted peak memory, reported if memory runs out; 0 if nothing is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """Predicted step time and memory of a run, and the files and options to plan again.

    Paths are relative to the folder of `balance.yaml`.
    """

    step_us: float
    reserve_bytes: int = 0
    """Bytes of each device outside its allocator; included in the predicted peak."""
    device: str = ""
    """Kind of the profiled device, such as `tpu`, if the executor cannot train on it and uses CPUs; else empty."""
    plan: str = "plan.yaml"
    profile: str = "profile.yaml"
    solve: tuple[str, ...] = ()
    """Options of `solve` to plan again with `--calibration FILE`. Options that the calibration sets are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Balance configuration (`balance.yaml`): cuts and settings with which the executor runs the stages of a plan.

    Stages list the names of their layers, so that a changed model is detected.
    """

    schema: Literal["gpipe-plan/balance/v1"] = BALANCE_SCHEMA
    generator: WritingTool | None = None
    plan_digest: str
    model: Model
    """Profiled model; `source` is relative to the folder of `balance.yaml`."""
    optimizer: str = ""
    dtype: Precision = ""
    """Value of `profile --dtype`; empty if the model runs as it is built."""
    device: str = "cpu"
    threads: int = 1
    schedule: ScheduleName
    chunks: int = field(default=1, metadata=LEFT_OUT)
    """Number of stages per device (V)."""
    placement: Placement = field(default="loop", metadata=LEFT_OUT)
    """Placement of the stages on the devices."""
    replicas: int = field(default=1, metadata=LEFT_OUT)
    """Number of pipelines that run in parallel (R), each with batch/R samples."""
    batch: int
    """Samples per optimizer step, over all replicas."""
    micro_batches: int
    """Number of micro-batches per step of each pipeline (M)."""
    balance: tuple[int, ...]
    stages: tuple[StageBalance, ...] = field(default=())
    order: tuple[str, ...] = ()
    """Actions of each device of a pipeline, in order, if the schedule was searched for this plan; else empty."""
    smaller: tuple[int, ...] = ()
    """Smaller numbers of processes that have a balance file (`balance_path_for_processes`), in descending order."""
    planned: RunPrediction | None = None
    """Predictions that are compared with the run at its end."""

    @property
    def num_stages(self) -> int:
        """Number of stages of one pipeline."""
        return len(self.balance)

    @property
    def num_devices(self) -> int:
        """Number of devices of one pipeline."""
        return len(self.balance) // self.chunks

    @property
    def num_processes(self) -> int:
        """Number of processes: one for each device of every pipeline."""
        return self.num_devices * self.replicas

    @property
    def replica_batch(self) -> int:
        """Number of samples per optimizer step of one pipeline."""
        return self.batch // self.replicas

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Predicted allocator peak of each device of a pipeline, in bytes; empty without predictions."""
        if self.planned is None:
            return ()
        sums = (sum(self.stages[stage].peak_bytes for stage in chunks) for chunks in self.by_device())
        return tuple(peak - self.planned.reserve_bytes for peak in sums)

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of every device of a pipeline, in pipeline order."""
        devices = range(self.num_devices)
        return tuple(stages_on(device, self.num_devices, self.chunks, self.placement) for device in devices)


def balance_path_for_processes(path: PurePath, num_processes: int) -> PurePath:
    """Return the path of the balance file for another number of processes: `balance-6.yaml` for 6, next to `path`."""
    return path.with_name(f"{path.stem}-{num_processes}{path.suffix}")


def launch_command(num_processes: int, script: str, *, nodes: int = 1) -> str:
    """Return the `torchrun` command that starts a script. With several machines, users run it on each machine.

    Args:
        num_processes: Processes on all machines together.
        script: Path of the script.
        nodes: Number of machines.
    """
    if nodes == 1:
        return f"torchrun --nproc-per-node {num_processes} {script}"
    several = f"torchrun --nnodes {nodes} --nproc-per-node {num_processes // nodes}"
    return f"{several} --rdzv-backend c10d --rdzv-endpoint HOST:29400 {script}"


def quote_options(options: Iterable[str]) -> str:
    """Return options as text for a shell. Their values are quoted, because they may come from a file."""
    words = (option.partition(" ") for option in options)
    return " ".join(shlex.join(filter(None, (name, value))) for name, _, value in words)


def memory_options(inputs: Inputs, device_how: str) -> tuple[str, ...]:
    """Return the options of `solve` that state a request's memory limits and headroom, such as `--mem 8GB`.

    `device_how` is `Device.how` of the profile: profiles with `estimated` values have another default headroom.
    """
    sizes = tuple(map(inputs.device_memory_for_limit, inputs.memory_bytes))
    limits = sizes[:1] if len(set(sizes)) == 1 else sizes
    free = (f"--headroom {100 * inputs.headroom:.12g}%",) if inputs.headroom or device_how == "estimated" else ()
    return (f"--mem {','.join(map(exact_bytes_option, limits))}", *free)


def replan_command(
    profile: str, options: Iterable[str], *, calibration: str | None = None, plan: str = "plan.yaml"
) -> str:
    """Return the command that makes a new plan and overwrites the old one.

    Args:
        profile: Path of the profile.
        options: Options of `solve`, as in `RunPrediction.solve`.
        calibration: Path of a calibration to plan with, if any.
        plan: Path of the plan.
    """
    words = ["gpipe-plan solve", shlex.quote(profile), quote_options(options)]
    places = {"--calibration": calibration, "-o": None if plan == "plan.yaml" else plan}
    words += [f"{name} {shlex.quote(place)}" for name, place in places.items() if place is not None]
    return " ".join(filter(None, words))
