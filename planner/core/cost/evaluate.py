"""A partition judged by the cost model: the one place where cuts, micro-batches and recomputation become a plan.

Solver, `check` and emitter all come here, so a plan means the same to each of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.device_memory import (
    ChunkMemory,
    SharedBytes,
    chunk_memory,
    device_memory,
    shared_bytes,
)
from planner.core.cost.memory import stage_memories
from planner.core.cost.moments import moments_of, stage_moments
from planner.core.cost.simulate import Event, StageTimes, last_end_us, period_us, simulate, summed_early_us
from planner.core.cost.stage_time import (
    CHOICES,
    busy_times,
    half_times,
    hidden_us,
    optimizer_tail_us,
    shared_gradient_bytes,
)
from planner.core.cost.step_time import gpipe_step
from planner.core.errors import UsageError
from planner.core.schedule import Action, Schedule, schedule_of
from planner.core.values.cluster import Cluster
from planner.core.values.limits import short
from planner.core.values.placement import Placement, device_of, stages_on
from planner.core.values.plan import Plan, Predicted, Recompute, ScheduleName, Stage, StageMemory
from planner.core.values.units import counted

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The answer of a planner, without its consequences."""

    schedule: ScheduleName
    micro_batches: int
    """M, of each pipeline."""
    balance: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    recomputed: tuple[tuple[int, ...], ...] = ()
    """Per stage, the layers (counted along the chain) that are recomputed where its choice is `layers`."""
    chunks: int = 1
    """V: stages per device."""
    order: tuple[str, ...] = ()
    """Per device what it does, where the schedule was made for this partition; see `Plan.order`."""
    replicas: int = 1
    devices: tuple[int, ...] = ()
    """Per stage, which device of the cluster runs it; empty for the usual order."""

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str]) -> "Partition":
        """What `plan` decides.

        Args:
            plan: The plan.
            names: The layers of the chain, in order.

        Raises:
            UsageError: A recomputed layer does not exist.
        """
        some = any(stage.recomputed for stage in plan.stages)
        usual = all(stage.device is None for stage in plan.stages)
        return cls(
            schedule=plan.schedule,
            micro_batches=plan.micro_batches,
            balance=plan.balance,
            recompute=tuple(stage.recompute for stage in plan.stages),
            recomputed=tuple(_positions(stage, names) for stage in plan.stages) if some else (),
            chunks=plan.chunks,
            order=plan.order,
            replicas=plan.replicas,
            devices=() if usual else tuple(plan.device_of(stage) for stage in plan.stages),
        )

    @property
    def num_devices(self) -> int:
        """K: devices of one pipeline."""
        return len(self.balance) // self.chunks

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """First layer and end of every stage."""
        return tuple(pairwise(accumulate(self.balance, initial=0)))

    def device_of(self, stage: int) -> int:
        """The device of the cluster that runs `stage`."""
        return self.devices[stage] if self.devices else device_of(stage, self.num_devices, self.placement)

    @property
    def rule(self) -> Schedule:
        """The schedule itself."""
        return schedule_of(self.schedule, self.order)

    @property
    def placement(self) -> Placement:
        """Which stages a device runs."""
        return self.rule.placement

    def chunks_of(self, device: int) -> tuple[int, ...]:
        """The stages that `device` of a pipeline runs, in the order of the chain."""
        return stages_on(device, self.num_devices, self.chunks, self.placement)

    def recomputed_in(self, stage: int) -> tuple[int, ...]:
        """The layers that are recomputed one by one in `stage`."""
        return self.recomputed[stage] if self.recomputed else ()

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """What every device does, in order; raises `UsageError` where the schedule cannot run so."""
        return self.rule.actions(self.num_devices, self.micro_batches, self.chunks)


def _positions(stage: Stage, names: Sequence[str]) -> tuple[int, ...]:
    places = {name: n for n, name in enumerate(names)}
    for name in stage.recomputed:
        if name not in places:
            raise UsageError(f'stage {stage.index} recomputes the layer "{name}", the profile has no such layer')
    return tuple(sorted(places[name] for name in stage.recomputed))


def check_partition(partition: Partition, *, num_layers: int, num_devices: int) -> None:
    """Every layer exactly once, no empty stage, not more devices than there are, recomputed layers where they belong.

    Raises:
        UsageError: An invariant does not hold.
    """
    balance, chunks, replicas = partition.balance, partition.chunks, partition.replicas
    if not balance or min(balance) < 1:
        raise UsageError(f"every stage needs at least one layer, got the balance {short(list(balance), 200)}")
    if sum(balance) != num_layers:
        raise UsageError(
            f"the balance {short(list(balance), 200)} adds up to {counted(sum(balance), 'layer')}, "
            f"the profile has {num_layers}",
            hint="every layer belongs to exactly one stage: make the sum right",
        )
    if chunks < 1 or len(balance) % chunks or (chunks > 1 and not partition.rule.is_chunked):
        raise UsageError(
            f"{len(balance)} stages cannot be {chunks} chunks on each device of a {partition.schedule} pipeline",
            hint="make the number of stages a multiple of `chunks`; not every schedule has chunks above 1",
        )
    if replicas < 1 or partition.num_devices * replicas > num_devices:
        pipelines = f"{replicas} pipelines of {partition.num_devices}" if replicas > 1 else f"{len(balance)} stages"
        raise UsageError(f"{pipelines} need {partition.num_devices * replicas} devices, there are {num_devices}")
    if len(partition.recompute) != len(balance):
        raise UsageError(f"{len(balance)} stages, but {len(partition.recompute)} recompute choices")
    if partition.devices and len(set(partition.devices)) != len(balance):
        raise UsageError(f"every stage needs a device of its own, got {list(partition.devices)}")
    for k, (first, end) in enumerate(partition.intervals()):
        layers = partition.recomputed_in(k)
        if bool(layers) != (partition.recompute[k] == "layers"):
            raise UsageError(f"stage {k}: `recompute: layers` and a list of `recomputed` layers belong together")
        if layers and not first <= min(layers) <= max(layers) < end:
            raise UsageError(f"stage {k} recomputes a layer that it does not run")
    partition.actions()


def stage_times(costs: ChainCosts, partition: Partition, cluster: Cluster) -> tuple[StageTimes, ...]:
    """What each stage needs for one micro-batch (design section 6: F_k, B_k = W_k + R_k, C_k)."""
    num_devices, placement, has_backward = partition.num_devices, partition.placement, costs.has_backward
    times = []
    for k, (first, end) in enumerate(partition.intervals()):
        again = [n for n in partition.recomputed_in(k) if has_backward[n]]
        busy = busy_times(
            costs.forward_us[first:end].sum(),
            costs.backward_us[first:end].sum(),
            (*CHOICES, "layers").index(partition.recompute[k]),
            has_backward=has_backward[end - 1],
            layers_us=costs.forward_us[again].sum(),
            speed=cluster.speed(partition.device_of(k)),
            overhead_us=cluster.overhead_us,
        )
        crosses = end < costs.num_layers
        ends = (device_of(stage, num_devices, placement) for stage in (k, k + 1))
        link = cluster.link_between(*ends, num_devices=num_devices, replicas=partition.replicas)
        durations = busy._asdict()
        if partition.rule.splits_backward:
            speed, halves = cluster.speed(partition.device_of(k)), costs.halves
            input_us, weight_us = halves.input_us[first:end].sum(), halves.weight_us[first:end].sum()
            durations |= half_times(busy, input_us, weight_us, speed=speed, overhead_us=cluster.overhead_us)._asdict()
        times.append(
            StageTimes(
                **{name: float(value) for name, value in durations.items()},
                send_us=link.transfer_us(float(costs.boundaries.output[end - 1])) if crosses else 0.0,
                blocking=crosses and link.blocking,
            )
        )
    return tuple(times)


def timeline(costs: ChainCosts, partition: Partition, cluster: Cluster) -> tuple[Event, ...]:
    """Simulated events of one step (the optimizer's step left out)."""
    return simulate(partition.actions(), stage_times(costs, partition, cluster))


def optimizer_us(costs: ChainCosts, partition: Partition, cluster: Cluster) -> float:
    """The delay of the next step, in microseconds: gradients summed over replicas, and the optimizers' steps."""
    # The chunk that a device runs last, and first again in the next step, is the first of its chunks.
    first = stage_times(costs, partition, cluster)[: partition.num_devices]
    hidden = np.array([hidden_us(times, times.send_us) for times in first])
    return float(optimizer_tail_us(updates_us(costs, partition, cluster), hidden))


def updates_us(costs: ChainCosts, partition: Partition, cluster: Cluster) -> FloatArray:
    """U of each device, of all of its chunks together, as far as it follows the device's last action; shape (K,)."""
    own_us = np.zeros(partition.num_devices)
    for k, (first, end) in enumerate(partition.intervals()):
        device = partition.device_of(k)
        own = own_step_us(costs, first, end, cluster, device=device, replicas=partition.replicas)
        own_us[device_of(k, partition.num_devices, partition.placement)] += own
    if partition.rule.splits_backward and partition.replicas > 1:
        # A chunk that is done early has its gradients summed meanwhile.
        sums_us = [sum_us(costs, *interval, cluster, replicas=partition.replicas) for interval in partition.intervals()]
        own_us -= summed_early_us(partition.actions(), stage_times(costs, partition, cluster), sums_us)
    return own_us


def own_step_us(
    costs: ChainCosts, first: int, end: int, cluster: Cluster, *, device: int = 0, replicas: int = 1
) -> float:
    """What follows the last backward on a stage: its gradients summed over the replicas, then its optimizer's step."""
    optimizer_us = float(costs.optimizer_us[first:end].sum() / cluster.speed(device))
    return optimizer_us + sum_us(costs, first, end, cluster, replicas=replicas)


def sum_us(costs: ChainCosts, first: int, end: int, cluster: Cluster, *, replicas: int) -> float:
    """What summing a stage's gradients over the replicas takes."""
    gradient_bytes = costs.gradients[first:end].sum() - shared_gradient_bytes(costs.ties, first, end)
    return float(cluster.allreduce_us(gradient_bytes, replicas))


def step_us(costs: ChainCosts, partition: Partition, cluster: Cluster) -> float:
    """Step time: closed form for GPipe, simulated for other schedules; and the optimizers' steps."""
    times = stage_times(costs, partition, cluster)
    if partition.rule.has_closed_form:
        pipeline_us = gpipe_step(times, micro_batches=partition.micro_batches).step_us
    elif partition.rule.splits_backward:
        # Gradients of weights fill the drain, so that what a device hides follows from its clocks alone.
        return period_us(partition.actions(), times, updates_us(costs, partition, cluster).tolist())
    else:
        pipeline_us = last_end_us(partition.actions(), times)
    return pipeline_us + optimizer_us(costs, partition, cluster)


def _busy_us(times: StageTimes, partition: Partition, stage: int) -> tuple[float, float]:
    """How long a stage computes in a step, and how much of that is computing activations again."""
    num = partition.micro_batches
    again = (num - 1) * times.recompute_us + times.last_recompute_us
    if not partition.rule.splits_backward:
        return num * (times.forward_us + times.backward_us) - times.backward_us + times.last_backward_us, again
    counts = Counter(action.kind for row in partition.actions() for action in row if action.stage == stage)
    halves = times.input_backward_us + times.weight_backward_us
    # Either way a micro-batch that is not recomputed spares as much.
    spared = times.recompute_us - times.last_recompute_us
    return num * times.forward_us + counts["I"] * halves + counts["B"] * times.backward_us - spared, again


def predict(costs: ChainCosts, partition: Partition, cluster: Cluster) -> Predicted:
    """The figures of a whole step."""
    times = stage_times(costs, partition, cluster)
    num_devices, micro_batches = partition.num_devices, partition.micro_batches
    total_us = step_us(costs, partition, cluster)
    pipeline_us = total_us - optimizer_us(costs, partition, cluster)
    if partition.rule.splits_backward:
        pipeline_us = period_us(partition.actions(), times, [0.0] * num_devices)
    busy, again = (sum(parts) for parts in zip(*(_busy_us(t, partition, k) for k, t in enumerate(times)), strict=True))
    pair_us = [t.forward_us + _backward_us(t, partition.rule) for t in times]
    device_us = [sum(pair_us[s] for s in partition.chunks_of(d)) for d in range(num_devices)]
    samples = micro_batches * costs.micro_batch_size * partition.replicas
    return Predicted(
        step_us=total_us,
        samples_per_s=samples / total_us * 1e6 if total_us else 0.0,
        bubble=1 - busy / (num_devices * pipeline_us) if pipeline_us else 0.0,
        ideal_bubble=0.0
        if partition.rule.splits_backward
        else (num_devices - 1) / (partition.chunks * micro_batches + num_devices - 1),
        imbalance=max(device_us) / (sum(device_us) / num_devices) if sum(device_us) else 1.0,
        recompute_share=again / busy if busy else 0.0,
        bottleneck_stage=pair_us.index(max(pair_us)),
    )


def stages_of(costs: ChainCosts, partition: Partition, cluster: Cluster) -> tuple[Stage, ...]:
    """Every stage with its times and itemised memory.

    Complexity: O(K L).
    """
    times = stage_times(costs, partition, cluster)
    memories = _memories(costs, partition, cluster)
    stages = []
    for k, ((first, end), memory) in enumerate(zip(partition.intervals(), memories, strict=True)):
        stages.append(
            Stage(
                index=k,
                first=costs.names[first],
                last=costs.names[end - 1],
                layers=end - first,
                device=partition.device_of(k) if partition.devices else None,
                recompute=partition.recompute[k],
                recomputed=tuple(costs.names[n] for n in partition.recomputed_in(k)),
                forward_us=times[k].forward_us,
                backward_us=_backward_us(times[k], partition.rule),
                backward_weight_us=times[k].weight_backward_us if partition.rule.splits_backward else 0.0,
                memory=memory,
                memory_bytes=cluster.memory_bytes[partition.device_of(k)],
            )
        )
    return tuple(stages)


def _backward_us(times: StageTimes, schedule: Schedule) -> float:
    """The backward of a micro-batch, both halves where it has them."""
    return times.input_backward_us + times.weight_backward_us if schedule.splits_backward else times.backward_us


def chunks_on(device: int, costs: ChainCosts, partition: Partition) -> dict[int, ChunkMemory]:
    """What every stage needs that a device of an interleaved pipeline runs; parameters that they share count once."""
    intervals = partition.intervals()
    cuts = np.array([[0, *(end for _, end in intervals)]])
    shared = shared_bytes(costs, cuts, partition.num_devices, partition.placement)
    return {
        k: chunk_memory(
            costs.of_replicas(partition.replicas),
            *intervals[k],
            micro_batches=partition.micro_batches,
            recompute=partition.recompute[k],
            recomputed=partition.recomputed_in(k),
            in_halves=partition.rule.splits_backward,
        ).without(SharedBytes(*(item[:, k : k + 1] for item in shared)), exact=costs.exact)
        for k in partition.chunks_of(device)
    }


def _memories(costs: ChainCosts, partition: Partition, cluster: Cluster) -> list[StageMemory]:
    schedule, num_stages = partition.rule, len(partition.balance)
    if not schedule.has_known_moments:
        return _chunk_memories(costs, partition, cluster)
    return stage_memories(
        costs.of_replicas(partition.replicas),
        partition.intervals(),
        [
            stage_moments(schedule, micro_batches=partition.micro_batches, behind=behind)
            for behind in reversed(range(num_stages))
        ],
        recompute=partition.recompute,
        recomputed=[partition.recomputed_in(k) for k in range(num_stages)],
        reserve_bytes=cluster.reserve_bytes,
    )


def _chunk_memories(costs: ChainCosts, partition: Partition, cluster: Cluster) -> list[StageMemory]:
    memories = [StageMemory()] * len(partition.balance)
    for device, moments in enumerate(moments_of(partition.actions())):
        chunks = chunks_on(device, costs, partition)
        for k, memory in zip(chunks, device_memory(list(chunks.values()), moments, cluster.reserve_bytes), strict=True):
            memories[k] = memory
    return memories
