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
from planner.solve.chain_dp import ChainProblem, Found, best_partition, lower_bound_us
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    micro_batches: int
    costs: ChainCosts
    memories: IntervalMemories
    problem: ChainProblem
    bound_us: float


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
    counts = micro_batch_counts(profile, request)
    candidates = [_candidate(profile, request, count) for count in counts]
    best: tuple[Found, _Candidate] | None = None
    # The most promising M first: its plan rules most others out by their bounds.
    for candidate in sorted(candidates, key=lambda c: (c.bound_us, c.micro_batches)):
        if not np.isfinite(candidate.bound_us):
            continue
        found = best_partition(candidate.problem, upper_us=best[0].step_us if best else np.inf)
        if found is not None:
            best = (found, candidate)
    if best is None:
        tried = tuple((c.micro_batches, c.costs) for c in candidates)
        raise explain_infeasible(Question(profile=profile, inputs=inputs, balance=request.balance, candidates=tried))
    found, candidate = best
    partition = Partition(
        schedule=inputs.schedule,
        micro_batches=candidate.micro_batches,
        balance=tuple(end - first for first, end in pairwise(found.cuts)),
        recompute=_recompute(candidate, found),
    )
    plan = build_plan(candidate.costs, partition, inputs=inputs, solver=_report(request, found))
    if request.balance is None:
        bound_us = plan.predicted.step_us
        plan = replace(plan, solver=replace(plan.solver, lower_bound_us=bound_us))
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


def _candidate(profile: Profile, request: Request, micro_batches: int) -> _Candidate:
    inputs = request.inputs
    cluster = cluster_of(inputs)
    costs = costs_at(profile, inputs.batch // micro_batches, extrapolate=inputs.extrapolate)
    memories = IntervalMemories.of(costs, micro_batches=micro_batches, policy=inputs.recompute)
    tables = {cap: intervals_for(costs, memories, cluster, cap) for cap in set(inputs.memory_bytes)}
    devices = tuple(tables[cap] for cap in inputs.memory_bytes)
    if request.balance is not None:
        devices = _only(devices, request.balance)
    problem = ChainProblem(
        devices=devices,
        micro_batches=micro_batches,
        link_us=link_us(costs, cluster),
        receive_us=receive_us(costs, cluster),
        work_us=np.concatenate([[0.0], np.cumsum(costs.forward_us + costs.backward_us)]),
        optimizer_us=np.concatenate([[0.0], np.cumsum(costs.optimizer_us)]),
    )
    return _Candidate(
        micro_batches=micro_batches,
        costs=costs,
        memories=memories,
        problem=problem,
        bound_us=lower_bound_us(problem),
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


def _recompute(candidate: _Candidate, found: Found) -> tuple[Recompute, ...]:
    stages = enumerate(pairwise(found.cuts))
    return tuple(CHOICES[candidate.problem.devices[k].choice[first, end]] for k, (first, end) in stages)


def _report(request: Request, found: Found) -> SolverReport:
    if request.balance is not None:
        return SolverReport(method="given", status="given")
    return SolverReport(method="dynamic-programming", status="optimal", gap=0.0, lower_bound_us=found.step_us)
