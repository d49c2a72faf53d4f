"""From what was asked to the plan: the exact search over cuts for every M that the profile covers."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.core.costs import ChainCosts, costs_at, covers
from planner.core.errors import UsageError
from planner.core.evaluate import Partition, check_partition
from planner.core.plan import Inputs, Plan, Recompute, SolverReport
from planner.core.planning import build_plan, cluster_of
from planner.core.profile import Profile
from planner.solve.chain_dp import ChainProblem, Found, best_partition
from planner.solve.explain import Question, explain_infeasible
from planner.solve.intervals import CHOICES, IntervalMemories, Intervals, intervals_for, link_us, receive_us

__all__ = ["Request", "micro_batch_counts", "solve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of the solver, beside `Inputs` that the plan records."""

    inputs: Inputs
    micro_batches: int | None = None
    """M, if the user fixed it."""
    balance: tuple[int, ...] | None = None
    """The cuts, if the user fixed them: then they are evaluated, and only M and recomputation are chosen."""


def solve(profile: Profile, request: Request) -> Plan:
    """The plan with the smallest step time under the caps, over stage counts, cuts, M and recomputation per stage.

    Among plans of equal step time the first found in a fixed order is taken: the same question always gets the same
    answer.

    Raises:
        UsageError: The question contradicts itself or the profile.
        InfeasibleError: No plan fits; the hint names the nearest things that would.
    """
    inputs = request.inputs
    _check_request(profile, request)
    chains = {
        m: costs_at(profile, inputs.batch // m, extrapolate=inputs.extrapolate)
        for m in micro_batch_counts(profile, request)
    }
    bounds = {m: _bound_us(costs, m, inputs) for m, costs in chains.items()}
    best: tuple[float, ChainCosts, Partition] | None = None
    # The most promising M first: its plan rules most others out by their bounds. One M's tables at a time are held.
    for m in sorted(chains, key=lambda m: (bounds[m], m)):
        upper_us = best[0] if best is not None else np.inf
        if bounds[m] >= upper_us:
            continue
        problem = _problem(chains[m], m, request)
        found = best_partition(problem, upper_us=upper_us)
        if found is not None:
            best = found.step_us, chains[m], _partition(problem, found)
    if best is None:
        question = Question(profile=profile, inputs=inputs, balance=request.balance, candidates=tuple(chains.items()))
        raise explain_infeasible(question)
    step_us, costs, partition = best
    if request.balance is not None:
        solver = SolverReport(method="given", status="given")
    else:
        solver = SolverReport(method="dynamic-programming", status="optimal", gap=0.0, lower_bound_us=step_us)
    plan = build_plan(costs, partition, inputs=inputs, solver=solver)
    if solver.status == "optimal":
        # The same time, added up in the order in which `check` will add it up.
        plan = replace(plan, solver=replace(solver, lower_bound_us=plan.predicted.step_us))
    return plan


def micro_batch_counts(profile: Profile, request: Request) -> tuple[int, ...]:
    """The M to choose among: divisors of the batch whose micro-batch size the profile covers.

    Raises:
        UsageError: There are none.
    """
    inputs = request.inputs
    batch = inputs.batch
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    if request.micro_batches is not None and request.micro_batches not in divisors:
        raise UsageError(
            f"a batch of {batch} cannot be split into {request.micro_batches} equal micro-batches",
            hint=f"M must divide the batch: one of {', '.join(map(str, divisors))}",
        )
    wanted = divisors if request.micro_batches is None else [request.micro_batches]
    counts = tuple(m for m in wanted if covers(profile, batch // m, extrapolate=inputs.extrapolate))
    if not counts:
        sizes = ", ".join(str(batch // m) for m in wanted)
        profiled = ", ".join(map(str, profile.micro_batch_sizes))
        raise UsageError(
            f"a batch of {batch} gives micro-batches of {sizes}: none lies within the profiled sizes {profiled}",
            hint="choose another `--batch`, profile more sizes with `--batch-sizes`, or allow `--extrapolate`",
        )
    return counts


def _check_request(profile: Profile, request: Request) -> None:
    num_layers, num_devices = len(profile.layers), request.inputs.devices
    if not 1 <= num_devices == len(request.inputs.memory_bytes):
        raise UsageError(f"{len(request.inputs.memory_bytes)} caps for {num_devices} devices: one for each is needed")
    if request.inputs.schedule != "gpipe":
        raise UsageError(f"only the GPipe schedule can be solved for so far, not `{request.inputs.schedule}`")
    if num_devices > num_layers:
        raise UsageError(
            f"{num_devices} devices for {num_layers} layers: every stage needs at least one layer",
            hint=f"use `--devices {num_layers}` or fewer, or profile the model in finer layers",
        )
    if request.balance is not None:
        never: Recompute = "never"
        recompute = tuple(never for _ in request.balance)
        given = Partition(schedule="gpipe", micro_batches=1, balance=request.balance, recompute=recompute)
        check_partition(given, num_layers=num_layers, num_devices=num_devices)


def _bound_us(costs: ChainCosts, micro_batches: int, inputs: Inputs) -> float:
    """Below the step time of every partition: memory, links, overheads and recomputation cost nothing here."""
    bottlenecks = sum(
        max(float(times.max()), float(times.sum()) / inputs.devices) for times in (costs.forward_us, costs.backward_us)
    )
    return float(costs.forward_us.sum() + costs.backward_us.sum()) + (micro_batches - 1) * bottlenecks


def _problem(costs: ChainCosts, micro_batches: int, request: Request) -> ChainProblem:
    inputs = request.inputs
    cluster = cluster_of(inputs)
    memories = IntervalMemories.of(costs, micro_batches=micro_batches, policy=inputs.recompute)
    tables = {cap: intervals_for(costs, memories, cluster, cap) for cap in set(inputs.memory_bytes)}
    devices = tuple(tables[cap] for cap in inputs.memory_bytes)
    if request.balance is not None:
        devices = _only(devices, request.balance)
    return ChainProblem(
        devices=devices,
        micro_batches=micro_batches,
        link_us=link_us(costs, cluster),
        receive_us=receive_us(costs, cluster),
        work_us=np.concatenate([[0.0], np.cumsum(costs.forward_us + costs.backward_us)]),
        optimizer_us=np.concatenate([[0.0], np.cumsum(costs.optimizer_us)]),
    )


def _only(devices: tuple[Intervals, ...], balance: tuple[int, ...]) -> tuple[Intervals, ...]:
    """The tables with nothing allowed but the stages of `balance`."""
    cuts = np.cumsum([0, *balance])
    only = []
    for k, (first, end) in enumerate(pairwise(cuts)):
        elsewhere = np.full_like(devices[k].forward, np.inf)
        elsewhere[first, end] = 0.0
        only.append(
            replace(
                devices[k],
                forward=devices[k].forward + elsewhere,
                backward=devices[k].backward + elsewhere,
                last_backward=devices[k].last_backward + elsewhere,
            )
        )
    return tuple(only)


def _partition(problem: ChainProblem, found: Found) -> Partition:
    stages = tuple(enumerate(pairwise(found.cuts)))
    return Partition(
        schedule="gpipe",
        micro_batches=problem.micro_batches,
        balance=tuple(end - first for _, (first, end) in stages),
        recompute=tuple(CHOICES[problem.devices[k].choice[first, end]] for k, (first, end) in stages),
    )
