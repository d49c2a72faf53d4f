"""Evaluation of a plan with other cuts, which the user gives."""

from collections.abc import Sequence
from dataclasses import replace

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition, check_partition
from planner.core.cost.stage_time import CHOICES
from planner.core.cost.width import tensor_parallel_profile
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Plan, Recompute, RecomputePolicy, SolverReport
from planner.core.values.profile import Profile


def with_cuts(
    plan: Plan, profile: Profile, balance: Sequence[int], *, memory_bytes: tuple[int, ...] | None = None
) -> Plan:
    """Return a plan with other cuts (`balance`: layers per stage), the recomputation they need, and status `given`.

    Each device gets the fastest allowed recompute choice that fits: `never`, `except-last` or `always`. If none fits,
    the device gets the choice with the least memory.

    Args:
        plan: Plan to change; its schedule, micro-batches and devices stay.
        profile: Profile of the plan.
        balance: Layers per stage; there may be more or fewer stages than in the plan.
        memory_bytes: Memory limit of each device in bytes; None for the limits of the plan.

    Raises:
        UsageError: The numbers of layers or devices are wrong, or the schedule cannot run so many stages.
    """
    inputs = plan.inputs if memory_bytes is None else replace(plan.inputs, memory_bytes=memory_bytes)
    cluster = inputs.cluster_of_groups(plan.tensor_parallel, plan.replicas)
    partition = Partition(
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        balance=tuple(balance),
        recompute=CHOICES[:1] * len(balance),
        chunks=plan.chunks,
        order=plan.order,
        replicas=plan.replicas,
    )
    check_partition(partition, num_layers=len(profile.layers), num_devices=cluster.num_devices)
    costs = costs_at(tensor_parallel_profile(profile, cluster), plan.micro_batch_size, extrapolate=inputs.extrapolate)
    evaluation = _fastest_fitting(costs, partition, cluster, inputs.recompute)
    return evaluation.plan(inputs, SolverReport(method="given", status="given"))


def _fastest_fitting(costs: ChainCosts, partition: Partition, cluster: Cluster, policy: RecomputePolicy) -> Evaluation:
    num_stages, num_devices = len(partition.balance), partition.num_devices
    allowed = [choice for choice in CHOICES if policy in (choice, "auto", "layers")]
    memories = {
        choice: Evaluation(costs, replace(partition, recompute=(choice,) * num_stages), cluster).memory
        for choice in allowed
    }
    chosen: list[Recompute] = []
    for device in range(num_devices):
        limit = cluster.memory_bytes[partition.device_of(device)]
        need = {choice: sum(of[k].total for k in partition.chunks_of(device)) for choice, of in memories.items()}
        fits = [choice for choice in allowed if need[choice] <= limit]
        chosen.append(fits[0] if fits else min(need, key=lambda choice: need[choice]))
    recompute = tuple(chosen[partition.device_of(stage)] for stage in range(num_stages))
    return Evaluation(costs, replace(partition, recompute=recompute), cluster)
