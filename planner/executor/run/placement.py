"""Place processes: the devices of a pipeline in order, one replica after another.

    rank = replica * K + device

`torchrun` numbers the processes of a machine in a row. So neighbors of a pipeline, which exchange tensors in every
micro-batch, are as close together as possible; replicas, which sum their gradients once per step, may be on other
machines. The planner assumes the same of nodes and links (`planner.core.values.cluster`). The stages of a device are in
`planner.core.values.placement`.
"""

from dataclasses import dataclass

import torch.distributed as dist

from planner.core.errors import UsageError
from planner.core.values.balance import Balance, launch_line
from planner.core.values.placement import Placement, device_of, rank_of, stages_on
from planner.core.values.units import pluralize


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Place of one process in the job."""

    rank: int
    replica: int
    num_replicas: int
    """Number of replicas (R)."""
    position: int
    """Position in the pipeline: the index of the first stage that it runs."""
    num_devices: int
    """Devices of a pipeline (K)."""
    stages: tuple[int, ...]
    """Stages that it runs, first to last."""
    placement: Placement = "loop"
    num_stages: int
    """Stages of the whole pipeline (K V)."""

    @property
    def is_first(self) -> bool:
        """True if it runs the first stage, which needs inputs."""
        return self.stages[0] == 0

    @property
    def is_last(self) -> bool:
        """True if it runs the last stage, which needs targets."""
        return self.stages[-1] == self.num_stages - 1

    def position_of(self, stage: int) -> int:
        """Return the position in the pipeline that runs `stage`."""
        return device_of(stage, self.num_devices, self.placement)

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """Return the rank that runs `stage`, in this replica or the given one."""
        replica = self.replica if replica is None else replica
        return rank_of(stage, replica, self.num_devices, self.placement)


def place_of(balance: Balance, rank: int, num_processes: int) -> ProcessPlace:
    """Return the place of process `rank` of `num_processes`.

    Args:
        balance: Balance configuration.
        rank: Rank of the process.
        num_processes: Processes of the job.

    Returns:
        The place.

    Raises:
        UsageError: The number of processes is not what the plan needs.
    """
    devices = balance.num_devices
    if num_processes != balance.num_processes:
        raise UsageError(
            f"the plan needs {_needed(balance)}, but {pluralize(num_processes, 'process', 'es')} "
            f"{'was' if num_processes == 1 else 'were'} started",
            hint=f"run `{launch_line(balance.num_processes, 'train.py')}`{_other_sizes(balance)}",
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
class Groups:
    """Process groups of one process; None where no group is needed, because it has all processes or only this one."""

    pipeline: dist.ProcessGroup | None
    """Processes of this replica."""
    replicas: dist.ProcessGroup | None
    """Processes that run the same stages."""

    @classmethod
    def of(cls, place: ProcessPlace) -> "Groups":
        """Make the groups of `place`; every process must call it."""
        if place.num_replicas == 1:
            return cls(None, None)
        # Every process makes every group, its own or not.
        devices, replicas = range(place.num_devices), range(place.num_replicas)
        pipelines = [dist.new_group([r * place.num_devices + d for d in devices]) for r in replicas]
        copies = [dist.new_group([r * place.num_devices + d for r in replicas]) for d in devices]
        return cls(pipelines[place.replica], copies[place.rank % place.num_devices])


def _other_sizes(balance: Balance) -> str:
    """Return a text on the other numbers of processes that there are plans for; empty if there are none."""
    sizes = " or ".join(map(str, balance.smaller))
    return f"; there are plans for {sizes} processes, too" if sizes else ""


def _needed(balance: Balance) -> str:
    """Return a text such as `4 processes (2 replicas of 2 devices with 3 stages each)`."""
    devices, replicas, chunks = balance.num_devices, balance.replicas, balance.chunks
    what = f"{pluralize(devices, 'device')} with {chunks} stages each" if chunks > 1 else pluralize(devices, "stage")
    of_replicas = f"{replicas} replicas of {what}" if replicas > 1 else what
    return f"{pluralize(balance.num_processes, 'process', 'es')} ({of_replicas})"
