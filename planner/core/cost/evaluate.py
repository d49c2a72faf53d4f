"""Predicted times and memory of a partition.

Solver, `check`, `show` and `emit` all read an `Evaluation`, so their predictions are equal.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.device_memory import ChunkMemory, SharedBytes, chunk_memory, chunk_memory_at_peak, shared_bytes
from planner.core.cost.memory import stage_memory
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import peak_allocation_counts, stage_peak_points
from planner.core.cost.simulate import Event, StageTimes, early_allreduces_us, last_end_us, period_us, simulate
from planner.core.cost.stage_time import (
    CHOICES,
    busy_times,
    optimizer_delay_us,
    optimizer_slack_us,
    shared_costs,
    split_backward_times,
)
from planner.core.cost.step_time import gpipe_step_us
from planner.core.cost.width import tensor_parallel_profile
from planner.core.cost.workload import training_run
from planner.core.schedule import Action
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Inputs, Plan, Predicted, SolverReport, Stage, StageMemory
from planner.core.values.profile import THIS_TOOL, Profile


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Predicted times and memory of a partition of a chain on a cluster, computed when they are first read."""

    costs: ChainCosts
    partition: Partition
    cluster: Cluster

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> "Evaluation":
        """Return the evaluation of the partition that a plan stores, with the costs of the layers in `profile`.

        Raises:
            UsageError: The profile lacks the plan's tensor-parallel size, its micro-batch size, or one of its layers.
        """
        priced = tensor_parallel_profile(profile, plan.cluster)
        costs = costs_at(priced, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
        return cls(costs, Partition.of(plan, costs.names), plan.cluster)

    @property
    def _splits_backward(self) -> bool:
        return self.partition.schedule_object.splits_backward

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of every device of a pipeline, in order."""
        return self.partition.actions()

    @cached_property
    def stage_times(self) -> tuple[StageTimes, ...]:
        """Times of each stage for one micro-batch."""
        return tuple(self._times_of(k, *interval) for k, interval in enumerate(self.partition.intervals()))

    def _times_of(self, stage: int, first: int, end: int) -> StageTimes:
        costs, partition, cluster = self.costs, self.partition, self.cluster
        has_backward, crosses = costs.has_backward, end < costs.num_layers
        speed = cluster.speed(partition.device_of(stage))
        recomputed = [n for n in partition.recomputed_in(stage) if has_backward[n]]
        busy = busy_times(
            costs.forward_us[first:end].sum() + costs.entry_us[first],
            costs.backward_us[first:end].sum(),
            (*CHOICES, "layers").index(partition.recompute[stage]),
            has_backward=has_backward[end - 1],
            recomputed_layers_us=costs.forward_us[recomputed].sum(),
            speed=speed,
            overhead_us=cluster.overhead_us,
        )
        durations = busy._asdict()
        if self._splits_backward:
            input_us, weight_us = (
                costs.split_backward.input_us[first:end].sum(),
                costs.split_backward.weight_us[first:end].sum(),
            )
            durations |= split_backward_times(
                busy, input_us, weight_us, speed=speed, overhead_us=cluster.overhead_us
            )._asdict()
        link = cluster.link_between(
            partition.device_of(stage),
            partition.device_of(stage + 1),
            num_devices=partition.num_devices,
            replicas=partition.replicas,
        )
        return StageTimes(
            **{name: float(value) for name, value in durations.items()},
            send_us=link.transfer_us(float(costs.boundaries.output[end - 1])) if crosses else 0.0,
            blocking=crosses and link.blocking,
        )

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Simulated events (actions and transfers) of one step, without the optimizer's step."""
        return simulate(self.actions, self.stage_times)

    @cached_property
    def gradient_allreduce_us(self) -> tuple[float, ...]:
        """Time to all-reduce each stage's gradients over the replicas, in microseconds."""
        costs = self.costs
        sizes = (
            costs.gradients[first:end].sum() - shared_costs(costs.ties, "gradient_bytes", first, end)
            for first, end in self.partition.intervals()
        )
        return tuple(float(self.cluster.allreduce_us(size, self.partition.replicas)) for size in sizes)

    @cached_property
    def between_steps_us(self) -> FloatArray:
        """Time of all-reduces and optimizer steps of each device after its last action, in microseconds."""
        partition, costs, between_steps_us = self.partition, self.costs, np.zeros(self.partition.num_devices)
        for k, ((first, end), sum_us) in enumerate(zip(partition.intervals(), self.gradient_allreduce_us, strict=True)):
            speed = self.cluster.speed(partition.device_of(k))
            optimizer_us = costs.optimizer_us[first:end].sum() - shared_costs(costs.ties, "optimizer_us", first, end)
            between_steps_us[partition.device_of(k)] += float(optimizer_us / speed) + sum_us
        if self._splits_backward and partition.replicas > 1:
            # While a device still runs other chunks, the gradients of a finished chunk are already summed.
            between_steps_us -= early_allreduces_us(self.actions, self.stage_times, self.gradient_allreduce_us)
        return between_steps_us

    @cached_property
    def optimizer_delay_us(self) -> float:
        """Microseconds by which all-reduces and optimizer steps delay the next step; not valid with split backwards."""
        between_steps_us = self.between_steps_us
        # A device's first chunk is the last one that it runs in a step, and the first one in the next step.
        first = self.stage_times[: self.partition.num_devices]
        return float(
            optimizer_delay_us(
                between_steps_us, np.array([optimizer_slack_us(times, times.send_us) for times in first])
            )
        )

    @cached_property
    def pipeline_us(self) -> float:
        """Time of a step in microseconds, without all-reduces and optimizer steps."""
        if self.partition.schedule_object.has_closed_form:
            return gpipe_step_us(self.stage_times, self.partition.micro_batches)
        if self._splits_backward:
            return period_us(self.actions, self.stage_times, [0.0] * self.partition.num_devices)
        return last_end_us(self.actions, self.stage_times)

    @cached_property
    def step_us(self) -> float:
        """Time of a step in microseconds, including all-reduces and optimizer steps."""
        if self._splits_backward:
            # Weight-gradient passes fill the end of the step, so the period follows from each device's begin and end.
            return period_us(self.actions, self.stage_times, self.between_steps_us.tolist())
        return self.pipeline_us + self.optimizer_delay_us

    @cached_property
    def predicted(self) -> Predicted:
        """Step time, throughput, bubble and other figures of a whole step."""
        partition, times = self.partition, self.stage_times
        num_devices, micro_batches, splits = partition.num_devices, partition.micro_batches, self._splits_backward
        busy, recompute_us = (
            sum(parts) for parts in zip(*map(self._busy_and_recompute_us, range(len(times))), strict=True)
        )
        pair_us = [t.forward_us + self._backward_us(t) for t in times]
        device_us = [0.0] * num_devices
        for stage, us in enumerate(pair_us):
            device_us[partition.device_of(stage)] += us
        samples = micro_batches * self.costs.micro_batch_size * partition.replicas
        workload, per_s = self.costs.workload, samples / self.step_us * 1e6 if self.step_us else 0.0
        return Predicted(
            step_us=self.step_us,
            samples_per_s=per_s,
            tokens_per_s=per_s * workload.tokens,
            flops_utilization=workload.utilization(per_s, num_devices * partition.replicas),
            bubble=1 - busy / (num_devices * self.pipeline_us) if self.pipeline_us else 0.0,
            ideal_bubble=0.0 if splits else (num_devices - 1) / (partition.chunks * micro_batches + num_devices - 1),
            imbalance=max(device_us) / (sum(device_us) / num_devices) if sum(device_us) else 1.0,
            recompute_share=recompute_us / busy if busy else 0.0,
            bottleneck_stage=pair_us.index(max(pair_us)),
        )

    def _backward_us(self, times: StageTimes) -> float:
        return times.input_backward_us + times.weight_backward_us if self._splits_backward else times.backward_us

    def _busy_and_recompute_us(self, stage: int) -> tuple[float, float]:
        times, num = self.stage_times[stage], self.partition.micro_batches
        recompute_us = (num - 1) * times.recompute_us + times.last_recompute_us
        if not self._splits_backward:
            busy_us = num * (times.forward_us + times.backward_us) - times.backward_us + times.last_backward_us
            return busy_us, recompute_us
        counts = Counter(action.kind for row in self.actions for action in row if action.stage == stage)
        split_backward = times.input_backward_us + times.weight_backward_us
        # With whole and with split backwards, a micro-batch that is not recomputed saves the same time.
        spared = times.recompute_us - times.last_recompute_us
        return num * times.forward_us + counts["I"] * split_backward + counts[
            "B"
        ] * times.backward_us - spared, recompute_us

    @cached_property
    def chunk_memories(self) -> tuple[ChunkMemory, ...]:
        """Memory of each stage. Parameters that several stages of a device share count once."""
        partition, intervals = self.partition, self.partition.intervals()
        costs = self.costs.of_replicas(partition.replicas)
        cuts = np.array([[0, *(end for _, end in intervals)]])
        shared = shared_bytes(costs, cuts, partition.num_devices, partition.placement)
        return tuple(
            chunk_memory(
                costs,
                *interval,
                micro_batches=partition.micro_batches,
                recompute=partition.recompute[k],
                recomputed=partition.recomputed_in(k),
                splits_backward=self._splits_backward,
            ).without(SharedBytes(*(item[:, k : k + 1] for item in shared)), exact=costs.exact)
            for k, interval in enumerate(intervals)
        )

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of each stage at the peak of its device, by component."""
        partition, num_stages = self.partition, len(self.partition.balance)
        if partition.schedule_object.has_known_peak_points:
            costs = self.costs.of_replicas(partition.replicas)
            return tuple(
                stage_memory(
                    costs,
                    *interval,
                    stage_peak_points(
                        partition.schedule_object,
                        micro_batches=partition.micro_batches,
                        num_later=num_stages - 1 - k,
                    ),
                    recompute=partition.recompute[k],
                    recomputed=partition.recomputed_in(k),
                    reserve_bytes=self.cluster.reserve_bytes,
                )
                for k, interval in enumerate(partition.intervals())
            )
        memories = [StageMemory()] * num_stages
        for device, counts in enumerate(peak_allocation_counts(self.actions)):
            stages = partition.chunks_of(device)
            chunks = [self.chunk_memories[k] for k in stages]
            for k, memory in zip(stages, chunk_memory_at_peak(chunks, counts, self.cluster.reserve_bytes), strict=True):
                memories[k] = memory
        return tuple(memories)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages with their times and memory, as a plan stores them."""
        costs, partition = self.costs, self.partition
        return tuple(
            Stage(
                index=k,
                first=costs.names[first],
                last=costs.names[end - 1],
                layers=end - first,
                recompute=partition.recompute[k],
                recomputed=tuple(costs.names[n] for n in partition.recomputed_in(k)),
                forward_us=self.stage_times[k].forward_us,
                backward_us=self._backward_us(self.stage_times[k]),
                backward_weight_us=self.stage_times[k].weight_backward_us if self._splits_backward else 0.0,
                memory=self.memory[k],
                memory_bytes=self.cluster.memory_bytes[partition.device_of(k)],
            )
            for k, (first, end) in enumerate(partition.intervals())
        )

    def plan(self, inputs: Inputs, solver: SolverReport) -> Plan:
        """Return a plan with the partition and its predictions.

        If `solver` has the status `given`, the user chose the cuts. The plan's gap and lower bounds are then 0.
        """
        partition, bare = self.partition, SolverReport(method=solver.method, status="given")
        return Plan(
            generator=THIS_TOOL,
            inputs=inputs,
            solver=bare if solver.status == "given" else solver,
            schedule=partition.schedule,
            chunks=partition.chunks,
            replicas=partition.replicas,
            tensor_parallel=self.cluster.tensor_parallel,
            micro_batches=partition.micro_batches,
            micro_batch_size=self.costs.micro_batch_size,
            balance=partition.balance,
            order=partition.order,
            stages=self.stages,
            placement=partition.placement,
            predicted=self.predicted,
            training=training_run(inputs, self.step_us, self.costs.workload),
        )
