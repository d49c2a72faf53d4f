"""Search over schedules, replicas, micro-batch counts and cuts: from a request to a plan with a lower bound."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.width import WidthTables
from planner.core.errors import SolverError
from planner.core.schedule import SEARCHED, Schedule
from planner.core.values.plan import Plan, ScheduleName, SolverReport
from planner.core.values.profile import Profile
from planner.solve.answer import Answer, Search
from planner.solve.cases import cases_of, check_request
from planner.solve.chain.gpipe import DYNAMIC_PROGRAMMING, tie_broken
from planner.solve.chain.quick import quick_answers, shape_of, without_bubble_us
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.methods import (
    MOST_ACTIONS_OF_SEARCH,
    bound_of,
    budgets,
    effort_of,
    has_linear_program,
    is_improved,
    promise_of,
    search_for,
)
from planner.solve.request import Request
from planner.solve.space.any_order import any_order_us
from planner.solve.space.case import Case

_NEAR: Final = 1.1
"""Largest ratio of a case's step time to the fastest one with which a longer search may make the case the fastest."""

_NEARBY: Final = 1.06
"""The same ratio for the second search pass, because longer searches made plans up to 5.5 % faster."""

_CLEARLY: Final = 1.01
"""Ratio of step times above which a plan with more chunks per device counts as slower."""

_NEAREST_SCHEDULES, _NEAREST_CASES = 2, 2
"""Number of schedules in the second pass if the schedule is `auto`; number of cases that `_searched_on` improves."""

MOST_WORK: Final = 20_000
"""Largest number of layers times devices for which further requests are solved for hints."""


def solve(profile: Profile, request: Request, *, tables: WidthTables | None = None, breaks_ties: bool = True) -> Plan:
    """Return the plan with the smallest step time under the memory limits.

    The search covers numbers of stages, cuts, M and recomputation; also tensor-parallel width, schedule, chunks and
    replicas if the request leaves them open. Ties in step time are broken by the lowest peak memory, then the fewest
    bytes moved, then the evenest stages. The same request therefore always gets the same plan.

    Args:
        profile: The profile to plan for.
        request: The request.
        tables: Cost tables of the profile, which save time if several requests share a profile; None to compute them.
        breaks_ties: False to return any of the fastest plans.

    Returns:
        The plan, with a lower bound of the step time of all plans.

    Raises:
        UsageError: The request contradicts itself or the profile.
        InfeasibleError: No plan fits; the hint names the smallest changes with which a plan fits.
        SolverError: No plan was found within the time limit.
    """
    check_request(profile, request)
    deadline = Deadline.after(request.time_limit_s, request.watch)
    cases = cases_of(profile, request, tables=tables)
    deadline = replace(deadline, least_us=min((case.bound_us for case in cases), default=0.0))
    searched = _searched(cases, request, deadline)
    best, bound_us = searched.best, searched.bound_us
    if best is None:
        from planner.solve.explain import infeasible, out_of_time  # noqa: PLC0415 - most requests have an answer

        if not searched.complete:
            raise out_of_time(request)
        error = infeasible(profile, request, cases)
        # If not everything was tried, the lack of a plan does not prove that none exists.
        raise error if bound_us == inf else SolverError(f"{error.message}, among the searched plans", hint=error.hint)
    answer = _tie_broken(best, deadline) if breaks_ties else best
    return _plan(answer, min(bound_us, best.step_us), request)


def plan_under(
    schedules: Collection[ScheduleName], profile: Profile, request: Request, *, upper_us: float
) -> Plan | None:
    """Return the best plan found under some schedules, or None if no plan beats `upper_us`.

    Args:
        schedules: Names of the schedules.
        profile: The profile to plan for.
        request: The request.
        upper_us: Step time to beat, in microseconds.

    Returns:
        The plan, with a lower bound of the step time of all plans under these schedules.

    Raises:
        UsageError: The request contradicts itself or the profile.
    """
    check_request(profile, request)
    cases = [case for case in cases_of(profile, request) if case.schedule.name in schedules]
    searched = _searched(cases, request, Deadline.after(request.time_limit_s, request.watch), upper_us=upper_us)
    best = searched.best
    return None if best is None else _plan(best, min(searched.bound_us, best.step_us), request)


class _Key(NamedTuple):
    """Key that distinguishes the cases of a request."""

    schedule: Schedule
    chunks: int
    replicas: int
    micro_batches: int
    tensor_parallel: int

    @classmethod
    def of(cls, case: Case) -> "_Key":
        return cls(case.schedule, case.chunks, case.replicas, case.micro_batches, case.cluster.tensor_parallel)


class _Searched(NamedTuple):
    best: Answer | None
    bounds_us: Mapping[ScheduleName, float]
    """For each schedule, a lower bound of the step time of all plans of its cases."""
    complete: bool
    """True if there was time to search every case."""
    answers: Mapping[_Key, Answer]
    """Answers of the cases that were searched."""

    @property
    def bound_us(self) -> float:
        """Lower bound of the step time of all plans of all cases."""
        return min(self.bounds_us.values(), default=inf)


def _searched(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float = inf) -> _Searched:
    """Search all cases for the best answer that beats `upper_us`."""
    if request.inputs.recompute != "layers" or all(case.schedule.has_closed_form for case in cases):
        return _in_passes(cases, request, deadline, upper_us=upper_us)
    # Recomputation of whole stages comes first, so that no plan with single layers is slower.
    whole = [replace(case, policy="auto") for case in cases]
    by_stage = _in_passes(whole, request, deadline.share(0.5), upper_us=upper_us)
    upper_us = upper_us if by_stage.best is None else by_stage.best.step_us
    by_layer = _one_by_one(cases, request, deadline, upper_us=upper_us, starts=by_stage.answers)
    return by_layer._replace(best=by_layer.best or by_stage.best)


def _in_passes(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float) -> _Searched:
    """Search all cases; if the schedule is `auto`, search the most promising schedules a second time, longer.

    The second search of a schedule has the same effort as a request for that schedule alone, so the answer is rarely
    slower than the answer to such a request. With this effort for every schedule, the search would take several times
    as long. The schedule `search` is searched in the second pass only, because it starts from the plans of all others.
    """
    if len({case.cluster.tensor_parallel for case in cases}) > 1:
        return _over_widths(cases, request, deadline, upper_us=upper_us)
    if request.inputs.schedule == SEARCHED.name:
        return _search_orders_twice(cases, request, deadline, upper_us=upper_us)
    if request.inputs.schedule != "auto" or request.actions is None or not request.searches_on:
        return _one_by_one(cases, request, deadline, upper_us=upper_us)
    named = [case for case in cases if not case.schedule.is_to_be_made]
    first = _one_by_one(named, request, deadline.share(0.5), upper_us=upper_us)
    best, complete = first.best, first.complete
    bounds_us, answers = dict(first.bounds_us), dict(first.answers)
    upper_us = upper_us if best is None else best.step_us
    found_us = _nearest_schedules(answers.values())
    for name in (SEARCHED.name, *found_us):
        own = [case for case in cases if case.schedule.name == name]
        if not own or bounds_us.get(name, 0.0) >= upper_us or found_us.get(name, 0.0) > upper_us * _NEARBY:
            continue
        alone = replace(request, inputs=replace(request.inputs, schedule=name))
        rest = deadline.share(0.5) if name == SEARCHED.name else deadline
        others_us = min((us for other, us in bounds_us.items() if other != name), default=inf)
        promising = {key for key, one in first.answers.items() if one.step_us <= upper_us * _NEARBY}
        search = _search_orders_twice if name == SEARCHED.name else _one_by_one
        again = search(own, alone, replace(rest, enough_us=others_us), upper_us=upper_us * _NEARBY, promising=promising)
        complete = complete and again.complete
        # The second search ignores plans slower than its limit, so its lower bound holds up to that limit only.
        bounds_us[name] = max(bounds_us.get(name, 0.0), min(again.bound_us, upper_us * _NEARBY))
        answers |= {
            key: one for key, one in again.answers.items() if key not in answers or one.step_us < answers[key].step_us
        }
        if again.best is not None and again.best.step_us < upper_us:
            best, upper_us = again.best, again.best.step_us
    return _with_own_orders(_Searched(best, bounds_us, complete, answers), cases, request, deadline)


def _with_own_orders(searched: _Searched, cases: Sequence[Case], request: Request, deadline: Deadline) -> _Searched:
    """Search for action orders from the best plan, unless the solver already made its orders; return the result."""
    best = searched.best
    if best is None or searched.bound_us >= best.step_us or best.case.schedule.is_to_be_made:
        return searched
    for case in cases:
        is_alike = _Key.of(case)._replace(schedule=best.case.schedule) == _Key.of(best.case)
        if is_alike and case.schedule.is_to_be_made and case.schedule.placement == best.case.schedule.placement:
            again = _improved_orders(case, best, request, deadline, most_actions=MOST_ACTIONS_OF_SEARCH // 2)
            return searched._replace(best=again or best)
    return searched


def _improved_orders(
    case: Case, start: Answer, request: Request, deadline: Deadline, *, most_actions: int
) -> Answer | None:
    """Search for action orders from the plan `start`; return a faster plan of the case, or None."""
    alone = replace(request, inputs=replace(request.inputs, schedule=SEARCHED.name))
    starts, budget = {_Key.of(case): start}, {SEARCHED.name: most_actions}
    return _one_by_one([case], alone, deadline, upper_us=start.step_us, starts=starts, budget=budget).best


def _search_orders_twice(
    cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float, promising: Collection[_Key] = ()
) -> _Searched:
    """Search all cases for action orders with half of the effort, then use the other half to improve the best plan."""
    first = _one_by_one(cases, request, deadline.share(0.5), upper_us=upper_us, promising=promising)
    best = first.best
    if best is None or first.bound_us >= best.step_us:
        return first
    left = MOST_ACTIONS_OF_SEARCH - sum(answer.actions for answer in first.answers.values())
    again = _improved_orders(best.case, best, request, deadline, most_actions=left)
    if again is None:
        return first
    return first._replace(best=again, answers={**first.answers, _Key.of(best.case): again})


def _over_widths(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float) -> _Searched:
    """Search cases of several tensor-parallel widths with about the effort that one width would get.

    A quick search under 1F1B ranks combinations of width, replicas and M. Under each schedule, the most promising
    combinations come first and get most of the schedule's effort. When it is spent, the remaining combinations count
    with their lower bounds. If the schedule is `auto`, the most promising schedules then get more effort, with the
    width and the replicas of the best plan.
    """
    is_open = request.inputs.schedule == "auto" and request.actions is not None
    quick = quick_answers(cases, deadline, upper_us=upper_us) if is_open else []
    found = min(quick, key=lambda answer: answer.step_us, default=None)
    ranks = {shape_of(answer.case): without_bubble_us(answer) for answer in quick}
    first = _one_by_one(cases, request, deadline.share(0.5), upper_us=upper_us, best=found, ranks=ranks)
    best = first.best
    if best is None or not is_open or not request.searches_on:
        return first
    width, replicas, _ = shape_of(best.case)
    names = [*_nearest_schedules(first.answers.values()), SEARCHED.name]
    for name in dict.fromkeys(names):
        own = [case for case in cases if case.schedule.name == name and shape_of(case)[:2] == (width, replicas)]
        named = replace(request, inputs=replace(request.inputs, schedule=name), searches_on=False)
        budget = {name: request.actions or 0}
        again = _one_by_one(own, named, deadline, upper_us=best.step_us, ranks=ranks, budget=budget)
        best = again.best or best
    return first._replace(best=best)


def _nearest_schedules(answers: Iterable[Answer]) -> dict[ScheduleName, float]:
    """Return the step times of the fastest schedules whose plans a longer search may improve, fastest first."""
    found_us: dict[ScheduleName, float] = {}
    for answer in answers:
        if answer.partition is not None and is_improved(answer.case.schedule):
            name = answer.case.schedule.name
            found_us[name] = min(answer.step_us, found_us.get(name, inf))
    return dict(sorted(found_us.items(), key=lambda item: item[1])[:_NEAREST_SCHEDULES])


def _one_by_one(
    cases: Sequence[Case],
    request: Request,
    deadline: Deadline,
    *,
    upper_us: float,
    starts: Mapping[_Key, Answer] = MappingProxyType({}),
    best: Answer | None = None,
    ranks: Mapping[tuple[int, int, int], float] | None = None,
    budget: Mapping[ScheduleName, int] = MappingProxyType({}),
    promising: Collection[_Key] = (),
) -> _Searched:
    """Search the cases one after the other.

    Args:
        cases: The cases.
        request: The request.
        deadline: Limits on time and effort.
        upper_us: Step time to beat, in microseconds.
        starts: Answers from which the searches of some cases start, as `start` of `search_for`.
        best: Best answer of earlier searches, or None.
        ranks: Estimated step times by width, replicas and M, which sort the cases if several widths share the effort.
        budget: Number of actions to simulate per schedule; if empty, the request decides.
        promising: Cases that are searched even if fewer chunks were faster, because an earlier pass found good plans.
    """
    is_open, first_us = request.inputs.schedule == "auto", upper_us
    is_second = deadline.enough_us < inf
    left = dict(budget) or budgets(request)
    unseen = Counter(case.schedule.name for case in cases)
    upper_us = upper_us if best is None else min(upper_us, best.step_us)
    answers: dict[_Key, Answer] = {}
    bounds_us: dict[ScheduleName, float] = {}
    complete = True
    # The most promising case comes first, because most other cases have a lower bound above the step time of its plan.
    # If the schedule is `auto`, GPipe comes before all others, because its best plan is found and proven quickly.
    ordered = sorted(cases, key=promise_of if is_open else bound_of)
    if ranks:
        ordered.sort(key=lambda case: (promise_of(case)[0], ranks.get(shape_of(case), inf)))
    for n, case in enumerate(ordered):
        unseen[case.schedule.name] -= 1
        least_us = _least_us(case, upper_us)
        if least_us >= upper_us:
            continue
        start = starts.get(_Key.of(case))
        is_hopeless = not case.schedule.has_closed_form and case.ideal_us >= upper_us
        is_spent = ranks is not None and left.get(case.schedule.name, 1) <= 0
        is_cut_short = (is_second or case.schedule.is_to_be_made) and _Key.of(case) not in promising
        has_chunks = is_cut_short and _has_enough_chunks(case, answers)
        most_actions = effort_of(case, left, unseen[case.schedule.name] + 1, is_ranked=ranks is not None)
        if has_chunks or is_spent or (is_open and left and is_hopeless and start is None):
            _bound_by(bounds_us, case, least_us)  # The case is skipped, but its lower bound still counts.
            left |= {case.schedule.name: left[case.schedule.name] - (most_actions or 0)} if has_chunks and left else {}
            continue
        # Cases without time left count with a weak bound that ignores memory. Reserve half of the time for them.
        share = deadline.share(0.5) if any(other.bound_us < upper_us for other in ordered[n + 1 :]) else deadline
        search, near_us = search_for(case, request, start), _near_us(upper_us, case, request)
        answer = _answer(search, case, upper_us=near_us, deadline=replace(share, most_actions=most_actions))
        if answer is None:
            complete = False
            _bound_by(bounds_us, case, least_us)
            continue
        if left:
            left[case.schedule.name] -= answer.actions
        answers[_Key.of(case)] = answer
        _bound_by(bounds_us, case, max(least_us, answer.lower_bound_us))
        if answer.partition is not None and answer.step_us < upper_us:
            best, upper_us = answer, answer.step_us
            deadline.note(upper_us, case.schedule.name)
    searched = _Searched(best, bounds_us, complete, answers)
    # In a second pass, only a plan near the best of all schedules may become the answer.
    near_us = first_us if is_second else inf
    return _searched_on(searched, deadline, near_us=near_us) if request.searches_on and not left else searched


def _answer(search: Search, case: Case, *, upper_us: float, deadline: Deadline) -> Answer | None:
    """Return the answer of a case; None if the time limit passed before anything was found."""
    try:
        return search(case, upper_us=upper_us, deadline=deadline)
    except OutOfTimeError:
        return None


def _has_enough_chunks(case: Case, answers: Mapping[_Key, Answer]) -> bool:
    """Return True if one chunk less per device was slower than two less: more chunks are then rarely faster."""
    key = _Key.of(case)
    fewer, fewest = (answers.get(key._replace(chunks=case.chunks - n)) for n in (1, 2))
    return fewer is not None and fewest is not None and fewer.step_us > fewest.step_us * _CLEARLY


def _least_us(case: Case, upper_us: float) -> float:
    """Return a lower bound of the case's step time; memory is considered only if the bound is below `upper_us`."""
    if case.bound_us >= upper_us or case.schedule.has_closed_form:
        return case.bound_us
    return max(case.bound_us, any_order_us(case))


def _bound_by(bounds_us: dict[ScheduleName, float], case: Case, bound_us: float) -> None:
    """Lower the bound of the case's schedule to `bound_us`, the lower bound of the case."""
    bounds_us[case.schedule.name] = min(bound_us, bounds_us.get(case.schedule.name, inf))


def _near_us(upper_us: float, case: Case, request: Request) -> float:
    """Return the step time that a case must beat: more than the fastest one if a longer search may improve its plan."""
    return upper_us * _NEAR if request.searches_on and is_improved(case.schedule) else upper_us


def _searched_on(searched: _Searched, deadline: Deadline, *, near_us: float) -> _Searched:
    """Return the result after longer searches that start from the fastest plans, if the best is not proven optimal.

    Plans that take longer than `near_us` are not improved.
    """
    best, answers = searched.best, dict(searched.answers)
    if best is None or searched.bound_us >= best.step_us:
        return searched
    from planner.solve.chunks.search import improve_answer  # noqa: PLC0415

    able = [a for a in answers.values() if has_linear_program(a.case.schedule) and a.case.policy != "layers"]
    near = (a for a in able if a.partition is not None and a.step_us <= near_us)
    found = sorted(near, key=lambda answer: answer.step_us)
    for answer in found[:_NEAREST_CASES]:
        better = answers[_Key.of(answer.case)] = improve_answer(answer, deadline=deadline)
        best = better if better.step_us < best.step_us else best
    return searched._replace(best=best, answers=answers)


def _tie_broken(answer: Answer, deadline: Deadline) -> Answer:
    """Replace the plan by the equally fast plan with the lowest peak memory, if there is time to find it."""
    if answer.method != DYNAMIC_PROGRAMMING or answer.case.policy == "layers":
        return answer
    case = answer.case
    try:
        cuts = tie_broken(case, answer.step_us, deadline=deadline)
    except OutOfTimeError:
        return answer
    return answer if cuts is None else answer._replace(partition=case.partition(cuts.cuts, cuts.choices))


def _plan(answer: Answer, bound_us: float, request: Request) -> Plan:
    assert answer.partition is not None
    evaluation = Evaluation(answer.case.costs, answer.partition, answer.case.cluster)
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
