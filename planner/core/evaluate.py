"""A partition judged by the cost model: the one place where cuts, micro-batches and recomputation become a plan.

Solver, `check` and emitter all come here, so a plan means the same to each of them.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner.core.cluster import Cluster
from planner.core.costs import ChainCosts
from planner.core.errors import UsageError
from planner.core.memory import stage_memory
from planner.core.plan import Plan, Predicted, Recompute, Schedule, Stage
from planner.core.schedule import actions_of, num_in_flight
from planner.core.simulate import Event, StageTimes, simulate
from planner.core.step_time import gpipe_step, optimizer_tail_us

__all__ = [
    "Partition",
    "check_partition",
    "optimizer_us",
    "predict",
    "stage_times",
    "stages_of",
    "step_us",
    "timeline",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The answer of a planner, without its consequences."""

    schedule: Schedule
    micro_batches: int
    balance: tuple[int, ...]
    recompute: tuple[Recompute, ...]

    @classmethod
    def of(cls, plan: Plan) -> "Partition":
        """What `plan` decides."""
        return cls(
            schedule=plan.schedule,
            micro_batches=plan.micro_batches,
            balance=plan.balance,
            recompute=tuple(stage.recompute for stage in plan.stages),
        )

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """First layer and end of every stage."""
        return tuple(pairwise(accumulate(self.balance, initial=0)))


def check_partition(partition: Partition, *, num_layers: int, num_devices: int) -> None:
    """Every layer exactly once, no empty stage, not more stages than devices.

    Raises:
        UsageError: An invariant does not hold.
    """
    balance = partition.balance
    if not balance or min(balance) < 1:
        raise UsageError(f"every stage needs at least one layer, got the balance {list(balance)}")
    if sum(balance) != num_layers:
        raise UsageError(
            f"the balance {list(balance)} adds up to {sum(balance)} layers, the profile has {num_layers}",
            hint="every layer belongs to exactly one stage: make the sum right",
        )
    if len(balance) > num_devices:
        raise UsageError(f"{len(balance)} stages need {len(balance)} devices, there are {num_devices}")
    if len(partition.recompute) != len(balance):
        raise UsageError(f"{len(balance)} stages, but {len(partition.recompute)} recompute choices")
    actions_of(partition.schedule, num_stages=len(balance), micro_batches=partition.micro_batches)


def stage_times(costs: ChainCosts, partition: Partition, cluster: Cluster) -> tuple[StageTimes, ...]:
    """What each stage needs for one micro-batch (design section 6: F_k, B_k = W_k + R_k, C_k)."""
    times = []
    for (first, end), recompute in zip(partition.intervals(), partition.recompute, strict=True):
        forward = float(costs.forward_us[first:end].sum())
        backward = float(costs.backward_us[first:end].sum())
        again = 0.0 if recompute == "never" else forward
        last_again = forward if recompute == "always" else 0.0
        crosses = end < costs.num_layers
        times.append(
            StageTimes(
                forward_us=forward + cluster.overhead_us,
                backward_us=backward + again + cluster.overhead_us,
                last_backward_us=backward + last_again + cluster.overhead_us,
                send_us=cluster.link.transfer_us(float(costs.output[end - 1])) if crosses else 0.0,
                blocking=crosses and cluster.link.blocking,
            )
        )
    return tuple(times)


def timeline(costs: ChainCosts, partition: Partition, cluster: Cluster) -> tuple[Event, ...]:
    """Simulated events of one step (the optimizer's step left out)."""
    num_stages = len(partition.balance)
    actions = actions_of(partition.schedule, num_stages=num_stages, micro_batches=partition.micro_batches)
    return simulate(actions, stage_times(costs, partition, cluster))


def optimizer_us(costs: ChainCosts, partition: Partition, cluster: Cluster) -> float:
    """By how much the optimizers' steps delay the next step."""
    own = [float(costs.optimizer_us[first:end].sum()) for first, end in partition.intervals()]
    return optimizer_tail_us(stage_times(costs, partition, cluster), own)


def step_us(costs: ChainCosts, partition: Partition, cluster: Cluster) -> float:
    """Step time: closed form for GPipe, simulated for 1F1B; and the optimizers' steps."""
    if partition.schedule == "gpipe":
        pipeline_us = gpipe_step(stage_times(costs, partition, cluster), micro_batches=partition.micro_batches).step_us
    else:
        pipeline_us = max(event.end_us for event in timeline(costs, partition, cluster))
    return pipeline_us + optimizer_us(costs, partition, cluster)


def predict(costs: ChainCosts, partition: Partition, cluster: Cluster) -> Predicted:
    """The figures of a whole step."""
    times = stage_times(costs, partition, cluster)
    num_stages, micro_batches = len(times), partition.micro_batches
    total_us = step_us(costs, partition, cluster)
    pipeline_us = total_us - optimizer_us(costs, partition, cluster)
    busy = [micro_batches * (t.forward_us + t.backward_us) - t.backward_us + t.last_backward_us for t in times]
    again = _recompute_us(costs, partition)
    pair_us = [t.forward_us + t.backward_us for t in times]
    return Predicted(
        step_us=total_us,
        samples_per_s=micro_batches * costs.micro_batch_size / total_us * 1e6 if total_us else 0.0,
        bubble=1 - sum(busy) / (num_stages * pipeline_us) if pipeline_us else 0.0,
        ideal_bubble=(num_stages - 1) / (micro_batches + num_stages - 1),
        imbalance=max(pair_us) / (sum(pair_us) / num_stages) if sum(pair_us) else 1.0,
        recompute_share=again / sum(busy) if sum(busy) else 0.0,
        bottleneck_stage=pair_us.index(max(pair_us)),
    )


def stages_of(costs: ChainCosts, partition: Partition, cluster: Cluster) -> tuple[Stage, ...]:
    """Every stage with its times and itemised memory.

    Complexity: O(K L).
    """
    times = stage_times(costs, partition, cluster)
    stages = []
    for k, (first, end) in enumerate(partition.intervals()):
        memory = stage_memory(
            costs,
            first,
            end,
            micro_batches=partition.micro_batches,
            in_flight=num_in_flight(partition.schedule, k, len(times), partition.micro_batches),
            recompute=partition.recompute[k],
            reserve_bytes=cluster.reserve_bytes,
        )
        stages.append(
            Stage(
                index=k,
                first=costs.names[first],
                last=costs.names[end - 1],
                layers=end - first,
                recompute=partition.recompute[k],
                forward_us=times[k].forward_us,
                backward_us=times[k].backward_us,
                memory=memory,
                memory_bytes=cluster.memory_bytes[k],
            )
        )
    return tuple(stages)


def _recompute_us(costs: ChainCosts, partition: Partition) -> float:
    jobs = {"never": 0, "except-last": partition.micro_batches - 1, "always": partition.micro_batches}
    return sum(
        jobs[recompute] * float(costs.forward_us[first:end].sum())
        for (first, end), recompute in zip(partition.intervals(), partition.recompute, strict=True)
    )
