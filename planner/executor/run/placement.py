"""Assignment of ranks to the devices of pipelines: device by device, one replica after another.

    rank = replica * K + device         K is the number of devices of a pipeline

`torchrun` gives consecutive ranks to the processes of a machine. Neighboring devices of a pipeline, which exchange
tensors in every micro-batch, are therefore on the same machine if possible. Replicas, which sum their gradients once
per step, may be on different machines. The planner assumes the same placement (`planner.core.values.cluster`). The
stages of a device are defined in `planner.core.values.placement`.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from planner.core.errors import UsageError
from planner.core.values.balance import Balance, launch_command
from planner.core.values.placement import Placement, rank_of, stages_on
from planner.core.values.units import pluralize

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Place of one process in the job: its replica, its device in the pipeline, and its stages."""

    rank: int
    replica: int
    num_replicas: int
    """Number of replicas (R)."""
    position: int
    """Index of the device in its pipeline, 0 to K - 1; also the index of the first stage that the process runs."""
    num_devices: int
    """Number of devices of a pipeline (K)."""
    stages: tuple[int, ...]
    """Stages that the process runs, first to last."""
    placement: Placement = "loop"
    num_stages: int
    """Number of stages of the whole pipeline: K times the number of stages per device."""

    @property
    def is_first(self) -> bool:
        """True if this process runs the first stage, which needs inputs."""
        return self.stages[0] == 0

    @property
    def is_last(self) -> bool:
        """True if this process runs the last stage, which needs targets."""
        return self.stages[-1] == self.num_stages - 1

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """Return the rank that runs `stage` in a replica, by default in this process's replica."""
        replica = self.replica if replica is None else replica
        return rank_of(stage, replica, self.num_devices, self.placement)


def process_place(balance: Balance, rank: int, num_processes: int) -> ProcessPlace:
    """Return the place of a process in the job.

    Args:
        balance: Plan as written in `balance.yaml`.
        rank: Rank of the process.
        num_processes: Number of processes of the job.

    Raises:
        UsageError: The plan needs another number of processes.
    """
    devices = balance.num_devices
    if num_processes != balance.num_processes:
        sizes = " or ".join(map(str, balance.smaller))
        raise UsageError(
            f"the plan needs {_needed_processes(balance)}, but {pluralize(num_processes, 'process', 'es')} "
            f"{'was' if num_processes == 1 else 'were'} started",
            hint=f"run `{launch_command(balance.num_processes, 'train.py')}`"
            + (f"; there are plans for {sizes} processes, too" if sizes else ""),
        )
    position = rank % devices
    return ProcessPlace(
        rank=rank,
        replica=rank // devices,
        num_replicas=balance.replicas,
        position=position,
        num_devices=devices,
        stages=stages_on(position, devices, balance.chunks, balance.placement),
        placement=balance.placement,
        num_stages=balance.num_stages,
    )


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of one process. In a job with a single replica, `pipeline` and `replicas` are None."""

    pipeline: dist.ProcessGroup | None
    """Processes of this replica."""
    replicas: dist.ProcessGroup | None
    """Processes that run the same stages, one of each replica."""

    @classmethod
    def of(cls, place: ProcessPlace) -> "ProcessGroups":
        """Create the process groups for the process at `place`. Every process must call this function."""
        if place.num_replicas == 1:
            return cls(None, None)
        # torch requires every process to create every group, even one that does not contain the process.
        devices, replicas = range(place.num_devices), range(place.num_replicas)
        pipelines = [dist.new_group([r * place.num_devices + d for d in devices]) for r in replicas]
        copies = [dist.new_group([r * place.num_devices + d for r in replicas]) for d in devices]
        return cls(pipelines[place.replica], copies[place.rank % place.num_devices])


def gather_from_all_ranks(value: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the values of all ranks of `group`, in order. Each of these ranks must call this function."""
    values = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _needed_processes(balance: Balance) -> str:
    devices, replicas, chunks = balance.num_devices, balance.replicas, balance.chunks
    what = f"{pluralize(devices, 'device')} with {chunks} stages each" if chunks > 1 else pluralize(devices, "stage")
    of_replicas = f"{replicas} replicas of {what}" if replicas > 1 else what
    return f"{pluralize(balance.num_processes, 'process', 'es')} ({of_replicas})"
