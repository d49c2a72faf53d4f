"""Cuts, micro-batches, schedule, recomputation and replicas of a plan, without its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner.core.errors import UsageError
from planner.core.schedule import Action, Schedule, schedule_of
from planner.core.values.limits import truncate
from planner.core.values.placement import Placement, device_of, stages_on
from planner.core.values.plan import Plan, Recompute, ScheduleName, Stage
from planner.core.values.units import pluralize


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Cuts, number of micro-batches, schedule, recomputation and replicas of a plan, without its predictions."""

    schedule: ScheduleName
    micro_batches: int
    """Number of micro-batches per step of each pipeline (M)."""
    balance: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    recomputed: tuple[tuple[int, ...], ...] = ()
    """Recomputed layers of each stage (indices in the chain), if its recompute choice is `layers`."""
    chunks: int = 1
    """Number of stages per device (V)."""
    order: tuple[str, ...] = ()
    """Action order of each device as text, if it was searched for this partition (`Plan.order`); else empty."""
    replicas: int = 1

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str]) -> "Partition":
        """Return the partition that a plan stores, for a chain with the layers `names`.

        Raises:
            UsageError: A recomputed layer is not in `names`.
        """
        some = any(stage.recomputed for stage in plan.stages)
        return cls(
            schedule=plan.schedule,
            micro_batches=plan.micro_batches,
            balance=plan.balance,
            recompute=tuple(stage.recompute for stage in plan.stages),
            recomputed=tuple(_positions(stage, names) for stage in plan.stages) if some else (),
            chunks=plan.chunks,
            order=plan.order,
            replicas=plan.replicas,
        )

    @property
    def num_devices(self) -> int:
        """Number of devices of one pipeline."""
        return len(self.balance) // self.chunks

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """Return the first layer of every stage, and one past its last layer."""
        return tuple(pairwise(accumulate(self.balance, initial=0)))

    def device_of(self, stage: int) -> int:
        """Return the index of the device, within its pipeline, that runs `stage`."""
        return device_of(stage, self.num_devices, self.placement)

    @property
    def schedule_object(self) -> Schedule:
        """Schedule of the partition, with the action orders in `order` if there are any."""
        return schedule_of(self.schedule, self.order)

    @property
    def placement(self) -> Placement:
        """Placement of the stages on the devices."""
        return self.schedule_object.placement

    def chunks_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that `device` runs, in pipeline order."""
        return stages_on(device, self.num_devices, self.chunks, self.placement)

    def recomputed_in(self, stage: int) -> tuple[int, ...]:
        """Return the recomputed layers of `stage` if its recompute choice is `layers`; else an empty tuple."""
        return self.recomputed[stage] if self.recomputed else ()

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of every device of a pipeline, in order.

        Raises:
            UsageError: The schedule cannot run with this number of devices, micro-batches or chunks.
        """
        return self.schedule_object.actions(self.num_devices, self.micro_batches, self.chunks)


def _positions(stage: Stage, names: Sequence[str]) -> tuple[int, ...]:
    places = {name: n for n, name in enumerate(names)}
    for name in stage.recomputed:
        if name not in places:
            raise UsageError(f'stage {stage.index} recomputes the layer "{name}", the profile has no such layer')
    return tuple(sorted(places[name] for name in stage.recomputed))


def check_partition(partition: Partition, *, num_layers: int, num_devices: int) -> None:
    """Raise an error if a partition is not valid for a chain and a cluster.

    In a valid partition, every layer belongs to one stage, no stage is empty, there are enough devices, and every stage
    contains the layers that it recomputes.

    Raises:
        UsageError: The partition is not valid.
    """
    balance, chunks, replicas = partition.balance, partition.chunks, partition.replicas
    if not balance or min(balance) < 1:
        raise UsageError(f"every stage needs at least one layer, got the balance {truncate(list(balance), 200)}")
    if sum(balance) != num_layers:
        raise UsageError(
            f"the balance {truncate(list(balance), 200)} adds up to {pluralize(sum(balance), 'layer')}, "
            f"the profile has {num_layers}",
            hint="every layer belongs to exactly one stage: correct the numbers",
        )
    if chunks < 1 or len(balance) % chunks or (chunks > 1 and not partition.schedule_object.is_chunked):
        raise UsageError(
            f"schedule {partition.schedule} with {chunks} chunks per device cannot run {len(balance)} stages",
            hint="make the number of stages a multiple of `chunks`; only some schedules allow `chunks` above 1",
        )
    if replicas < 1 or partition.num_devices * replicas > num_devices:
        pipelines = f"{replicas} pipelines of {partition.num_devices}" if replicas > 1 else f"{len(balance)} stages"
        raise UsageError(f"{pipelines} need {partition.num_devices * replicas} devices, there are {num_devices}")
    if len(partition.recompute) != len(balance):
        raise UsageError(f"{len(balance)} stages, but {len(partition.recompute)} recompute choices")
    for k, (first, end) in enumerate(partition.intervals()):
        layers = partition.recomputed_in(k)
        if bool(layers) != (partition.recompute[k] == "layers"):
            raise UsageError(f"stage {k} needs both `recompute: layers` and a list of `recomputed` layers, or neither")
        if layers and not first <= min(layers) <= max(layers) < end:
            raise UsageError(f"stage {k} recomputes a layer that it does not run")
    partition.actions()
