"""From what was asked to the plan: over schedules, replicas, micro-batch counts and cuts, with a certificate."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from planner.core.cost.costs import CostTable
from planner.core.cost.evaluate import Evaluation
from planner.core.errors import InfeasibleError, SolverError, UsageError
from planner.core.extras import is_installed
from planner.core.schedule import SCHEDULES, SEARCHED, Schedule
from planner.core.values.plan import Inputs, Plan, ScheduleName, SolverReport
from planner.core.values.profile import Profile
from planner.core.values.units import counted
from planner.solve.answer import Answer, Search
from planner.solve.cases import cases_of, micro_batch_counts
from planner.solve.chain.gpipe import DYNAMIC_PROGRAMMING, search_gpipe, tie_broken
from planner.solve.checks import check_request
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.request import Request
from planner.solve.space.case import Case

MOST_ACTIONS_OF_SEARCH: Final = 3_000_000
"""About ten seconds, for all cases where a schedule is to be searched."""

_IN_HALVES: Final = 6
"""Each named schedule in halves has one of so many parts of the effort for others, where the schedule is left open."""

MOST_WORK: Final = 20_000
"""Layers times devices, beyond which nothing is solved beside the question itself."""


def solve(profile: Profile, request: Request, *, table: CostTable | None = None, breaks_ties: bool = True) -> Plan:
    """The plan with the smallest step time under the caps.

    Over stage counts, cuts, M, recomputation, and where they are left open schedules, chunks and replicas. Among plans
    of equal step time the one with the lowest peak memory, then the fewest bytes moved, then the evenest stages is
    taken, then the first found in a fixed order: the same question always gets the same answer.

    Args:
        profile: What the layers cost.
        request: The question.
        table: The profile's costs, if they were read before: for many questions on one profile.
        breaks_ties: Whether equal step times are told apart: without, any of the fastest plans is the answer.

    Raises:
        UsageError: The question contradicts itself or the profile.
        InfeasibleError: No plan fits; the hint names the nearest things that would.
    """
    check_request(profile, request)
    deadline = Deadline.after(request.time_limit_s)
    cases = cases_of(profile, request, table=table)
    best, bound_us, complete, _ = _searched(cases, request, deadline)
    if best is None and not complete:
        raise _out_of_time(request)
    if best is None:
        error = _infeasible(profile, request, cases)
        # Where not everything was tried, that nothing was found proves nothing.
        raise error if bound_us == inf else SolverError(f"{error.message}, as far as was searched", hint=error.hint)
    answer = _tie_broken(best, deadline) if breaks_ties else best
    return _plan(answer, min(bound_us, best.step_us), request)


def plan_under(
    schedules: Collection[ScheduleName], profile: Profile, request: Request, *, upper_us: float
) -> Plan | None:
    """The best plan found under any of `schedules`, if it beats `upper_us`; raises `UsageError` as `solve`."""
    check_request(profile, request)
    cases = [case for case in cases_of(profile, request) if case.schedule.name in schedules]
    best, bound_us, _, _ = _searched(cases, request, Deadline.after(request.time_limit_s), upper_us=upper_us)
    return None if best is None else _plan(best, min(bound_us, best.step_us), request)


class _Key(NamedTuple):
    """What tells the cases of a question apart."""

    schedule: Schedule
    chunks: int
    replicas: int
    micro_batches: int

    @classmethod
    def of(cls, case: Case) -> "_Key":
        return cls(case.schedule, case.chunks, case.replicas, case.micro_batches)


class _Searched(NamedTuple):
    best: Answer | None
    bound_us: float
    """No plan of the cases can beat it."""
    complete: bool
    """Whether there was time for every case."""
    answers: Mapping[_Key, Answer]
    """What each case that was searched came to."""


def _searched(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float = inf) -> _Searched:
    """The best of all cases that beats `upper_us`."""
    if request.inputs.recompute != "layers" or all(case.schedule.has_closed_form for case in cases):
        return _one_by_one(cases, request, deadline, upper_us=upper_us)
    # Whole stages first, as if nothing else had been asked: so no plan with single layers is slower than that.
    whole = [replace(case, policy="auto") for case in cases]
    by_stage = _one_by_one(whole, request, deadline.share(0.5), upper_us=upper_us)
    upper_us = upper_us if by_stage.best is None else by_stage.best.step_us
    by_layer = _one_by_one(cases, request, deadline, upper_us=upper_us, by_stage=by_stage.answers)
    return by_layer._replace(best=by_layer.best or by_stage.best)


def _one_by_one(
    cases: Sequence[Case],
    request: Request,
    deadline: Deadline,
    *,
    upper_us: float,
    by_stage: Mapping[_Key, Answer] = MappingProxyType({}),
) -> _Searched:
    """Goes through the cases; `by_stage` has answers to them where whole stages are recomputed."""
    is_open = request.inputs.schedule == "auto"
    left = _budgets(request)
    unseen = Counter(case.schedule.name for case in cases)
    best: Answer | None = None
    answers: dict[_Key, Answer] = {}
    bound_us, complete = inf, True
    # The most promising case first: its plan rules most others out by their bounds. Where the schedule is left open,
    # GPipe comes before all others: its best plan is soon known and proven, whatever effort and time they may take.
    ordered = sorted(cases, key=_promise if is_open else _bound)
    for n, case in enumerate(ordered):
        unseen[case.schedule.name] -= 1
        if case.bound_us >= upper_us:
            continue
        whole = by_stage.get(_Key.of(case))
        is_hopeless = not case.schedule.has_closed_form and case.ideal_us >= upper_us
        if is_open and left and is_hopeless and whole is None:
            bound_us = min(bound_us, case.bound_us)  # hardly worth the effort, but that proves nothing
            continue
        most_actions = left.get(case.schedule.name)
        if most_actions is not None and case.schedule.is_to_be_made:
            # A search for lists ends when its effort does: each case has its share.
            most_actions //= unseen[case.schedule.name] + 1
        # What no case leaves time for counts with a bound that knows no memory: half of the time is for the others.
        share = deadline.share(0.5) if any(other.bound_us < upper_us for other in ordered[n + 1 :]) else deadline
        try:
            search = _search_for(case, request, whole)
            answer = search(case, upper_us=upper_us, deadline=replace(share, most_actions=most_actions))
        except OutOfTimeError:
            complete = False
            bound_us = min(bound_us, case.bound_us)
            continue
        if left:
            left[case.schedule.name] -= answer.actions
        answers[_Key.of(case)] = answer
        bound_us = min(bound_us, answer.lower_bound_us)
        if answer.partition is not None and answer.step_us < upper_us:
            best, upper_us = answer, answer.step_us
    is_open_ended = request.searches_on and not left and bound_us < upper_us
    if best is not None and is_open_ended and _has_linear_program(best.case.schedule) and best.case.policy != "layers":
        from planner.solve.chunks.search import search_on  # noqa: PLC0415

        best = answers[_Key.of(best.case)] = search_on(best, deadline=deadline)
    return _Searched(best, bound_us, complete, answers)


def _budgets(request: Request) -> dict[ScheduleName, int]:
    """By schedule, how many actions may be simulated for all of its cases; as many as it takes for those left out."""
    if request.inputs.schedule == SEARCHED.name:
        return {SEARCHED.name: MOST_ACTIONS_OF_SEARCH}
    if request.inputs.schedule != "auto" or request.actions is None:
        return {}
    # There are many named schedules in halves, which a searched one begins with, too.
    named = {name: request.actions // (_IN_HALVES if rule.splits_backward else 1) for name, rule in SCHEDULES.items()}
    return {**named, SEARCHED.name: request.actions // 4}


def _bound(case: Case) -> tuple[float, ...]:
    return case.bound_us, case.replicas, case.micro_batches


def _promise(case: Case) -> tuple[float, ...]:
    rank = [*SCHEDULES, SEARCHED.name].index(case.schedule.name)
    return rank, case.bound_us if case.schedule.has_closed_form else case.ideal_us, case.replicas, case.micro_batches


def _tie_broken(answer: Answer, deadline: Deadline) -> Answer:
    """The plan with the lowest peak of those as fast as the best, as long as there is time for it."""
    is_reordered = answer.partition is not None and bool(answer.partition.devices)
    if answer.method != DYNAMIC_PROGRAMMING or answer.case.policy == "layers" or is_reordered:
        return answer
    case = answer.case
    try:
        cuts = tie_broken(case, answer.step_us, deadline=deadline)
    except OutOfTimeError:
        return answer
    return answer if cuts is None else answer._replace(partition=case.partition(cuts.cuts, cuts.choices))


def _search_for(case: Case, request: Request, by_stage: Answer | None) -> Search:
    """Return the search of the case; `by_stage` is its answer with whole stages recomputed, if it is known."""
    # What a question does without is not imported: `check` asks a short one.
    if request.solver == "milp":
        from planner.solve.integer import search_integer_program  # noqa: PLC0415

        return search_integer_program
    if request.inputs.any_order:
        from planner.solve.chain.any_order import search_any_order  # noqa: PLC0415

        return search_any_order
    if case.policy == "layers":
        from planner.solve.layers.search import search_layers  # noqa: PLC0415

        return partial(search_layers, by_stage=by_stage)
    return search_gpipe if case.schedule.has_closed_form else _simulated_search(case.schedule)


def _simulated_search(schedule: Schedule) -> Search:
    if schedule.is_to_be_made:
        from planner.solve.orders.search import search_orders  # noqa: PLC0415

        return search_orders
    if schedule.is_one_forward_one_backward:
        from planner.solve.chain.one_forward_one_backward import search_one_forward_one_backward  # noqa: PLC0415

        return search_one_forward_one_backward
    from planner.solve.chunks.search import search_chunks  # noqa: PLC0415

    return search_chunks


def lacks_bound(schedules: Iterable[Schedule]) -> bool:
    """Return True if answers under one of the schedules would have a better bound with HiGHS installed."""
    return not is_installed("highspy") and any(map(_has_linear_program, schedules))


def _has_linear_program(schedule: Schedule) -> bool:
    return not (schedule.has_closed_form or schedule.is_to_be_made or schedule.is_one_forward_one_backward)


def _plan(answer: Answer, bound_us: float, request: Request) -> Plan:
    assert answer.partition is not None
    evaluation = Evaluation(answer.case.costs, answer.partition, request.inputs.cluster)
    step_us = evaluation.step_us
    if request.balance is not None:
        solver = SolverReport(method="given", status="given")
    elif bound_us >= step_us * (1 - 1e-9):
        # The same time, added up in the order in which `check` will add it up.
        solver = SolverReport(method=answer.method, status="optimal", lower_bound_us=step_us)
    else:
        gap = 1 - bound_us / step_us
        solver = SolverReport(method=answer.method, status="feasible", gap=gap, lower_bound_us=bound_us)
    return evaluation.plan(request.inputs, solver)


def _infeasible(profile: Profile, request: Request, cases: Sequence[Case]) -> InfeasibleError:
    if not cases:
        return _too_few(profile, request)

    def cases_for(other: Profile, inputs: Inputs, micro_batches: int | None) -> Sequence[Case]:
        try:
            return cases_of(other, replace(request, inputs=inputs, micro_batches=micro_batches))
        except UsageError:
            return []  # the cuts or rules that were given leave it nothing to try

    from planner.solve.explain import Asking, explain_infeasible  # noqa: PLC0415 - most questions have an answer

    return explain_infeasible(
        Asking(
            profile=profile,
            inputs=request.inputs,
            micro_batches=request.micro_batches,
            balance=request.balance,
            schedules=request.schedules,
            cases=tuple(cases),
            cases_for=cases_for,
        )
    )


def _too_few(profile: Profile, request: Request) -> InfeasibleError:
    """The error where there are not as many devices and layers as two devices need for their stages."""
    inputs, schedule = request.inputs, request.schedules[0]
    devices = counted(inputs.devices // max(1, inputs.replicas), "device")
    chunks = (schedule.exact_chunks or max(2, inputs.chunks)) if schedule.is_chunked else 1
    try:
        schedule.refuse(1, max(micro_batch_counts(profile, request)), chunks)
    except UsageError as error:
        return InfeasibleError(error.message, hint=error.hint)  # even one device is too many for the micro-batches
    return InfeasibleError(
        f"{schedule.title} needs at least 2 devices and {2 * chunks} layers for {counted(chunks, 'stage')} on each, "
        f"not {devices} and {counted(len(profile.layers), 'layer')}",
        hint="use `--schedule 1f1b` or `--schedule gpipe`",
    )


def _out_of_time(request: Request) -> SolverError:
    return SolverError(
        f"no plan was found within the time limit of {request.time_limit_s:g} s",
        hint="allow more with `--time-limit`, or fix `--micro-batches`",
    )
