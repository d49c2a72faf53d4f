"""A partition and what was asked, made into a plan; and back."""

from dataclasses import replace

from planner import __version__
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.evaluate import Partition, predict, stages_of
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Inputs, Plan, SolverReport
from planner.core.values.profile import Generator

GENERATOR = Generator(name="gpipe-plan", version=__version__)


def cluster_of(inputs: Inputs) -> Cluster:
    """The devices and links that a plan was made for."""
    return Cluster(
        memory_bytes=inputs.memory_bytes,
        speeds=inputs.speeds,
        compute=inputs.compute,
        link=inputs.link,
        inter_link=inputs.inter_link,
        node_devices=inputs.node_devices,
        links=inputs.links,
        allreduce=inputs.allreduce,
        reserve_bytes=inputs.reserve_bytes,
        overhead_us=inputs.overhead_us,
    )


def build_plan(costs: ChainCosts, partition: Partition, *, inputs: Inputs, solver: SolverReport) -> Plan:
    """The plan for `partition`, every derived number computed from `costs`."""
    cluster = cluster_of(inputs)
    predicted = predict(costs, partition, cluster)
    if solver.status == "given":
        solver = replace(solver, gap=0.0, lower_bound_us=0.0)
    return Plan(
        generator=GENERATOR,
        inputs=inputs,
        solver=solver,
        schedule=partition.schedule,
        chunks=partition.chunks,
        placement=partition.placement,
        replicas=partition.replicas,
        micro_batches=partition.micro_batches,
        micro_batch_size=costs.micro_batch_size,
        balance=partition.balance,
        order=partition.order,
        stages=stages_of(costs, partition, cluster),
        predicted=predicted,
    )
