"""Search over schedules, replicas, micro-batch counts and cuts: from a request to a plan with a lower bound."""

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
"""Actions to simulate for all cases of a searched schedule: about ten seconds."""

_IN_HALVES: Final = 6
"""Divisor of the effort of each named schedule with a split backward, if the schedule is `auto`."""

MOST_WORK: Final = 20_000
"""Limit on layers times devices, above which no further requests are solved for hints."""


def solve(profile: Profile, request: Request, *, table: CostTable | None = None, breaks_ties: bool = True) -> Plan:
    """Return the plan with the smallest step time under the memory limits.

    The search covers stage counts, cuts, M and recomputation, and schedules, chunks and replicas that are left open.
    Ties in step time are broken by the lowest peak memory, then the fewest bytes moved, then the evenest stages, then a
    fixed order. The same request therefore always gets the same plan.

    Args:
        profile: The profile to plan for.
        request: The request.
        table: Costs of the profile, if they were read before; saves time for several requests on one profile.
        breaks_ties: Whether to break ties; if False, any of the fastest plans is returned.

    Returns:
        The plan, with its lower bound.

    Raises:
        UsageError: The request contradicts itself or the profile.
        InfeasibleError: No plan fits; the hint names the nearest changes that would.
        SolverError: No plan was found within the time limit.
    """
    check_request(profile, request)
    deadline = Deadline.after(request.time_limit_s)
    cases = cases_of(profile, request, table=table)
    best, bound_us, complete, _ = _searched(cases, request, deadline)
    if best is None and not complete:
        raise _out_of_time(request)
    if best is None:
        error = _infeasible(profile, request, cases)
        # If not everything was tried, the lack of a plan does not prove that none exists.
        raise error if bound_us == inf else SolverError(f"{error.message}, as far as was searched", hint=error.hint)
    answer = _tie_broken(best, deadline) if breaks_ties else best
    return _plan(answer, min(bound_us, best.step_us), request)


def plan_under(
    schedules: Collection[ScheduleName], profile: Profile, request: Request, *, upper_us: float
) -> Plan | None:
    """Return the best plan found under some schedules, or None if none beats `upper_us`.

    Args:
        schedules: Names of the schedules.
        profile: The profile to plan for.
        request: The request.
        upper_us: Step time to beat, in microseconds.

    Returns:
        The plan, with its lower bound.

    Raises:
        UsageError: The request contradicts itself or the profile.
    """
    check_request(profile, request)
    cases = [case for case in cases_of(profile, request) if case.schedule.name in schedules]
    best, bound_us, _, _ = _searched(cases, request, Deadline.after(request.time_limit_s), upper_us=upper_us)
    return None if best is None else _plan(best, min(bound_us, best.step_us), request)


class _Key(NamedTuple):
    """Key that distinguishes the cases of a request."""

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
    """Lower bound of all plans of the cases."""
    complete: bool
    """True if there was time for every case."""
    answers: Mapping[_Key, Answer]
    """Answers of the cases that were searched."""


def _searched(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float = inf) -> _Searched:
    """Return the best answer of all cases that beats `upper_us`."""
    if request.inputs.recompute != "layers" or all(case.schedule.has_closed_form for case in cases):
        return _one_by_one(cases, request, deadline, upper_us=upper_us)
    # Recomputation of whole stages comes first, so that no plan with single layers is slower.
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
    """Search the cases one after the other; `by_stage` has their answers with whole stages recomputed."""
    is_open = request.inputs.schedule == "auto"
    left = _budgets(request)
    unseen = Counter(case.schedule.name for case in cases)
    best: Answer | None = None
    answers: dict[_Key, Answer] = {}
    bound_us, complete = inf, True
    # The most promising case comes first, because its plan rules out most others by their bounds. If the schedule is
    # open, GPipe comes before all others: its best plan is found and proven quickly.
    ordered = sorted(cases, key=_promise if is_open else _bound)
    for n, case in enumerate(ordered):
        unseen[case.schedule.name] -= 1
        if case.bound_us >= upper_us:
            continue
        whole = by_stage.get(_Key.of(case))
        is_hopeless = not case.schedule.has_closed_form and case.ideal_us >= upper_us
        if is_open and left and is_hopeless and whole is None:
            bound_us = min(bound_us, case.bound_us)  # not worth the effort, but its bound still counts
            continue
        most_actions = left.get(case.schedule.name)
        if most_actions is not None and case.schedule.is_to_be_made:
            # A search for action orders uses all of its effort, so each case has a share.
            most_actions //= unseen[case.schedule.name] + 1
        # Cases without time left count with a weak bound that ignores memory. Reserve half of the time for them.
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
    """Return the actions to simulate per schedule, for all of its cases; schedules that are left out have no limit."""
    if request.inputs.schedule == SEARCHED.name:
        return {SEARCHED.name: MOST_ACTIONS_OF_SEARCH}
    if request.inputs.schedule != "auto" or request.actions is None:
        return {}
    # There are many named schedules with a split backward, and the searched schedule starts from them as well.
    named = {name: request.actions // (_IN_HALVES if rule.splits_backward else 1) for name, rule in SCHEDULES.items()}
    return {**named, SEARCHED.name: request.actions // 4}


def _bound(case: Case) -> tuple[float, ...]:
    return case.bound_us, case.replicas, case.micro_batches


def _promise(case: Case) -> tuple[float, ...]:
    rank = [*SCHEDULES, SEARCHED.name].index(case.schedule.name)
    return rank, case.bound_us if case.schedule.has_closed_form else case.ideal_us, case.replicas, case.micro_batches


def _tie_broken(answer: Answer, deadline: Deadline) -> Answer:
    """Return the plan with the lowest peak memory among the fastest plans, if there is time for it."""
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
    # Import only the search that is needed, so that short requests, such as those of `check`, start quickly.
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
        # Use the same order of summation as `check`, so that both get exactly the same time.
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
            return []  # the given cuts or rules leave no case

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
    """Return the error for too few devices or layers for the schedule's stages on two devices."""
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
