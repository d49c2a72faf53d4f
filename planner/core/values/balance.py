"""The balance configuration: what the executor needs of a plan. These are the values behind `balance.yaml`."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Literal

from planner.core.values.placement import Placement, stages_on
from planner.core.values.plan import Recompute, ScheduleName
from planner.core.values.precision import Precision
from planner.core.values.profile import Generator, Model

BALANCE_SCHEMA: Final = "gpipe-plan/balance/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBalance:
    """One stage: its layers by module path."""

    index: int
    device: int | None = None
    """Which of a pipeline's devices runs it; None where it is the usual one: `index`, modulo K."""
    recompute: Recompute
    layers: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    """The layers that are recomputed, each on its own, where `recompute` is `layers`."""
    peak_bytes: int = 0
    """Memory that the plan predicts for it, to be told when there is too little; 0 where nothing is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the plan predicts of a run, and where to plan again. Paths are relative to the folder of this file."""

    step_us: float
    reserve_bytes: int = 0
    """What of every device's peak is for what its allocator does not see."""
    device: str = ""
    """The kind of device that it is predicted for, where the bundled executor does not train on such."""
    plan: str = "plan.yaml"
    profile: str = "profile.yaml"
    solve: tuple[str, ...] = ()
    """The options that ask the plan's question again, each with its value; of a plan for the bundled executor those
    beside `--calibration`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The cuts by name, so that a model whose layers moved is caught, and how to run them."""

    schema: Literal["gpipe-plan/balance/v1"] = BALANCE_SCHEMA
    generator: Generator | None = None
    plan_digest: str
    model: Model
    """`source` is relative to the folder of this file."""
    optimizer: str = ""
    dtype: Precision = ""
    """What `profile --dtype` asked for; empty where the model runs as it is built."""
    device: str = "cpu"
    threads: int = 1
    schedule: ScheduleName
    chunks: int = 1
    """V: stages per device."""
    placement: Placement = "loop"
    """Which stages these are."""
    replicas: int = 1
    """R: pipelines side by side, each with batch/R samples."""
    batch: int
    """Samples per optimizer step, over all replicas."""
    micro_batches: int
    """M, of each pipeline."""
    balance: tuple[int, ...]
    stages: tuple[StageBalance, ...] = field(default=())
    order: tuple[str, ...] = ()
    """Per device of a pipeline what it does, one thing after the other, where the schedule was made for the plan."""
    smaller: tuple[int, ...] = ()
    """Numbers of processes, most first, for which other cuts of the same model stand beside: see `beside`."""
    planned: Planned | None = None
    """To be held against what a run took, at its end."""

    @property
    def num_stages(self) -> int:
        """K V: stages of one pipeline."""
        return len(self.balance)

    @property
    def num_devices(self) -> int:
        """K: devices of one pipeline."""
        return len(self.balance) // self.chunks

    @property
    def num_processes(self) -> int:
        """K R: one process per device of every pipeline."""
        return self.num_devices * self.replicas

    @property
    def replica_batch(self) -> int:
        """Samples per optimizer step of one pipeline."""
        return self.batch // self.replicas

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak that the allocator of each of a pipeline's devices is predicted to see; empty where none is."""
        if self.planned is None:
            return ()
        sums = (sum(self.stages[stage].peak_bytes for stage in chunks) for chunks in self.by_device())
        return tuple(peak - self.planned.reserve_bytes for peak in sums)

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every device of a pipeline, in pipeline order."""
        devices = range(self.num_devices)
        return tuple(stages_on(device, self.num_devices, self.chunks, self.placement) for device in devices)

    @property
    def device_order(self) -> tuple[int, ...]:
        """Which of the pipeline's devices each stage of a round is on, counted among those that it uses."""
        named = [stage.index if stage.device is None else stage.device for stage in self.stages[: self.num_devices]]
        return tuple(sorted(named).index(device) for device in named)


def beside(path: PurePath, num_processes: int) -> PurePath:
    """Where the cuts for fewer processes stand beside the balance configuration at `path`: `balance-6.yaml`."""
    return path.with_name(f"{path.stem}-{num_processes}{path.suffix}")


def launch_line(num_processes: int, script: str, *, nodes: int = 1) -> str:
    """How to start `script` on one machine, or on each of `nodes` machines."""
    if nodes == 1:
        return f"torchrun --nproc-per-node {num_processes} {script}"
    several = f"torchrun --nnodes {nodes} --nproc-per-node {num_processes // nodes}"
    return f"{several} --rdzv-backend c10d --rdzv-endpoint HOST:29400 {script}"


def as_typed(options: Iterable[str]) -> str:
    """Return options as a shell takes them; values may come from a file, so they are quoted."""
    words = (option.partition(" ") for option in options)
    return " ".join(shlex.join(filter(None, (name, value))) for name, _, value in words)


def solve_again(
    profile: str, options: Iterable[str], *, calibration: str | None = None, plan: str = "plan.yaml"
) -> str:
    """Return the command that makes a plan anew, at the same place.

    Args:
        profile: Path of the profile.
        options: Of `solve`, as `Planned.solve` has them.
        calibration: Path of a calibration to plan with, if any.
        plan: Path of the plan.
    """
    words = ["gpipe-plan solve", shlex.quote(profile), as_typed(options)]
    places = {"--calibration": calibration, "-o": None if plan == "plan.yaml" else plan}
    words += [f"{name} {shlex.quote(place)}" for name, place in places.items() if place is not None]
    return " ".join(filter(None, words))
