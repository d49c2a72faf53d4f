"""Search for the best plan of a request, over schedules, replicas, micro-batches and cuts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.width import CostTablesByWidth
from planner.core.errors import NoPlanFoundError
from planner.core.schedule import SEARCHED
from planner.core.values.plan import Plan, ScheduleName, SolverReport
from planner.core.values.profile import Profile
from planner.solve.answer import SAME, Answer
from planner.solve.cases import cases_of, check_request
from planner.solve.chain.gpipe import DYNAMIC_PROGRAMMING, best_of_equally_fast
from planner.solve.chain.quick import quick_answers, step_us_without_bubble, width_replicas_and_micro_batches
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.methods import (
    MOST_ACTIONS_OF_SEARCH,
    NEARBY,
    CaseKey,
    SearchedCases,
    fastest_answers,
    fastest_schedules_us,
    fastest_us_across_schedules,
    gains_from_longer_search,
    has_linear_program,
    improve_fastest_answers,
    key_without_schedule,
    lower_bound_of_case_us,
    lower_bound_of_named_schedules_us,
    search_cases,
)
from planner.solve.request import Request
from planner.solve.space.case import Case

_FAR: Final = 1.12
"""Action orders are searched for a case only if a named schedule takes at most this multiple of the fastest step time:
searches for orders made plans at most 9.5 % faster."""

_CLOSE: Final = 1.05
"""Value of `_FAR` for requests with several tensor-parallel widths."""

_CLEARLY: Final = 1.07
"""Action orders are also searched from the best plan with a named schedule (any except `search`), if it takes less than
this multiple of the step time of the best plan with searched orders."""


_TIED: Final = 1.005
"""Action orders are searched from plans that take at most this multiple of the fastest step time."""

_MOST_STARTS: Final = 2
"""Largest number of plans from which action orders are searched. Of plans that differ only in the schedule, the fastest
is used."""

_MOST_ACTIONS_OF_CASE: Final = 200_000
"""Number of simulated actions that each case adds to the budget of a search for action orders."""

_NEAREST_SCHEDULES: Final = 2
"""Number of fastest schedules that are searched again for longer, if several tensor-parallel widths are possible."""

_NEAREST_OF_WIDTH: Final = 3
"""Number of fastest schedules that are searched again for longer, if only one tensor-parallel width is possible."""

_LONG_BUDGET: Final = 3
"""Multiplier of `Request.actions` in the second search of a schedule. This search has a single case, which may use half
of these actions."""

_FIRST_BUDGET: Final = 5
"""Divisor of `Request.actions` in the first pass over tensor-parallel widths."""

_MOST_RANKED: Final = 2
"""Number of combinations of tensor-parallel width, replicas and M for which action orders are searched. They have
the smallest step times, estimated without bubble."""

_MOST_IMPROVED: Final = 2
"""Number of plans whose action orders are searched again, if several tensor-parallel widths are possible."""

_SHORT_BUDGET: Final = 6
"""Divisor of `Request.actions` in the second pass, which has only the width, replicas and M of the best plan so far."""

_MOST_ACTIONS_OF_RANKED: Final = 2_400_000
"""Limit on the simulated actions of one schedule, over all tensor-parallel widths, replicas and M."""

MOST_WORK: Final = 20_000
"""Limit on layers times devices. Above it, no requests are solved for hints, schedule comparisons and certificates."""


def solve(
    profile: Profile, request: Request, *, tables: CostTablesByWidth | None = None, breaks_ties: bool = True
) -> Plan:
    """Return the plan with the smallest step time under the memory limits.

    Of equally fast plans, return the one with the lowest peak memory, then with the fewest bytes moved, then with the
    most equal stages. So the same request always gets the same plan.

    Args:
        profile: The profile to plan for.
        request: The request.
        tables: Cost tables of the profile, which save time if several requests share a profile; None to compute them.
        breaks_ties: False to return any of the fastest plans.

    Raises:
        UsageError: The request contradicts itself or the profile.
        InfeasibleError: No plan fits; the hint names the smallest changes with which a plan fits.
        NoPlanFoundError: No plan was found that fits, but there may be one.
        SolverError: No plan was found within the time limit.
    """
    check_request(profile, request)
    deadline = Deadline.after(request.time_limit_s, request.watch)
    cases = cases_of(profile, request, tables=tables)
    deadline = replace(deadline, least_us=min((case.bound_us for case in cases), default=0.0))
    searched = _searched(cases, request, deadline)
    best, bound_us = searched.best, searched.bound_us
    if best is None:
        from planner.solve import explain  # noqa: PLC0415 - most requests have an answer

        if not searched.complete:
            raise explain.out_of_time_error(request)
        error = explain.infeasible_error(profile, request, cases)
        # If not everything was tried, the lack of a plan does not prove that none exists.
        is_proven = bound_us == inf or all(map(explain.state_exceeds_memory, cases))
        raise error if is_proven else NoPlanFoundError(f"{error.message}, among the searched plans", hint=error.hint)
    # Skipped cases are not faster than the best plan. A simpler plan may be slower than the best plan.
    bound_us = min(bound_us, best.step_us)
    named_us = lower_bound_of_named_schedules_us(cases, searched, request, deadline)
    answer = searched.simplest_answer(best, request.inputs.simplest)
    answer = _tie_broken(answer, deadline) if breaks_ties else answer
    return _plan(answer, bound_us, request, named_bound_us=named_us)


def plan_with_schedules(
    schedules: Collection[ScheduleName], profile: Profile, request: Request, *, upper_us: float
) -> Plan | None:
    """Return the best plan found under some schedules, with a lower bound; None if no plan beats `upper_us`.

    Args:
        schedules: Names of the schedules.
        profile: The profile to plan for.
        request: The request.
        upper_us: Step time to beat, in microseconds.

    Raises:
        UsageError: The request contradicts itself or the profile.
    """
    check_request(profile, request)
    cases = [case for case in cases_of(profile, request) if case.schedule.name in schedules]
    searched = _searched(cases, request, Deadline.after(request.time_limit_s, request.watch), upper_us=upper_us)
    best = searched.best
    return None if best is None else _plan(best, min(searched.bound_us, best.step_us), request)


def _searched(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float = inf) -> SearchedCases:
    if request.inputs.recompute != "layers" or all(case.schedule.has_closed_form for case in cases):
        return _in_passes(cases, request, deadline, upper_us=upper_us)
    # Recomputation of whole stages comes first, so that no plan with per-layer recomputation is slower.
    whole = [replace(case, policy="auto") for case in cases]
    by_stage = _in_passes(whole, request, deadline.share(0.5), upper_us=upper_us)
    upper_us = upper_us if by_stage.best is None else by_stage.best.step_us
    by_layer = search_cases(cases, request, deadline, upper_us=upper_us, starts=by_stage.answers)
    best, answers = by_layer.best or by_stage.best, fastest_answers(by_stage.answers, by_layer.answers)
    return by_layer._replace(best=best, answers=answers)


def _in_passes(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float) -> SearchedCases:
    if len({case.cluster.tensor_parallel for case in cases}) > 1:
        return _over_widths(cases, request, deadline, upper_us=upper_us)
    if request.inputs.schedule == SEARCHED.name:
        return _search_orders_twice(cases, request, deadline, upper_us=upper_us)
    if request.inputs.schedule != "auto" or request.actions is None or not request.searches_longer:
        return search_cases(cases, request, deadline, upper_us=upper_us)
    # Named schedules come first, because the search for action orders starts from their plans.
    named = [case for case in cases if not case.schedule.needs_search]
    first = search_cases(named, request, deadline.share(0.5), upper_us=upper_us)
    first = _searched_longer(first, request, deadline.share(0.5))
    first = improve_fastest_answers(first, request, deadline.share(0.5))
    upper_us = upper_us if first.best is None else first.best.step_us
    own = [case for case in cases if case.schedule.needs_search]
    found_us = fastest_us_across_schedules(first.answers.values())
    far = [case for case in own if found_us.get(key_without_schedule(case), 0.0) > upper_us * _FAR]
    near = [case for case in own if case not in far]
    alone = replace(request, inputs=replace(request.inputs, schedule=SEARCHED.name))
    again = _search_orders_twice(near, alone, deadline.share(0.5), upper_us=upper_us * NEARBY)
    # The search ignores plans slower than its limit, so its lower bound holds up to that limit only.
    least_us = min([again.bound_us, upper_us, *(lower_bound_of_case_us(case, upper_us) for case in far)])
    bounds_us = {**first.bounds_us, SEARCHED.name: least_us}
    complete, answers = first.complete and again.complete, {**first.answers, **again.answers}
    searched = SearchedCases(first.best, bounds_us, complete, answers)
    searched_us = inf if again.best is None else again.best.step_us
    # The best searched plan was the start of a search for action orders already.
    improved = searched
    if searched_us * _CLEARLY > upper_us:
        improved = _with_own_orders(searched, own, request, deadline, improved=again.best)
    improved_us = upper_us if improved.best is None else improved.best.step_us
    return improved._replace(best=again.best) if searched_us <= improved_us * (1 + SAME) else improved


def _searched_longer(first: SearchedCases, request: Request, deadline: Deadline) -> SearchedCases:
    # Search the fastest case of each of the fastest schedules again, with about the effort of a requested schedule.
    best, answers = first.best, first.answers
    if best is None or first.bound_us >= best.step_us:
        return first
    for name in fastest_schedules_us(answers.values(), _NEAREST_OF_WIDTH):
        of_name = (a for a in answers.values() if a.case.schedule.name == name and a.partition is not None)
        case, upper_us = min(of_name, key=lambda answer: answer.step_us).case, best.step_us * NEARBY
        named = replace(request, inputs=replace(request.inputs, schedule=name), searches_longer=False)
        budget = {name: _LONG_BUDGET * (request.actions or 0)}
        again = search_cases([case], named, deadline, upper_us=upper_us, budget=budget)
        answers = fastest_answers(answers, again.answers)
        best = again.best if again.best is not None and again.best.step_us < best.step_us else best
    return first._replace(best=best, answers=answers)


def _with_own_orders(
    searched: SearchedCases,
    cases: Sequence[Case],
    request: Request,
    deadline: Deadline,
    *,
    improved: Answer | None = None,
) -> SearchedCases:
    # An earlier search that started from `improved` found no better orders.
    best = searched.best
    if best is None or searched.bound_us >= best.step_us:
        return searched
    own = {key_without_schedule(case): case for case in cases}
    # Plans that are almost equally fast may lead to very different orders.
    starts: dict[tuple[object, ...], Answer] = {}
    for answer in sorted([best, *searched.answers.values()], key=lambda answer: answer.step_us):
        is_tied = answer.partition is not None and answer.step_us <= best.step_us * _TIED
        if is_tied and (improved is None or _cuts_and_order(answer) != _cuts_and_order(improved)):
            starts.setdefault(key_without_schedule(answer.case), answer)
    chosen = [(own[key], start) for key, start in starts.items() if key in own][:_MOST_STARTS]
    for case, start in chosen:
        again = _improved_orders(case, start, request, deadline, most=MOST_ACTIONS_OF_SEARCH // len(chosen))
        best = again if again is not None and again.step_us < best.step_us else best
    return searched._replace(best=best)


def _cuts_and_order(answer: Answer) -> tuple[object, ...]:
    partition = answer.partition
    assert partition is not None
    return partition.micro_batches, partition.balance, partition.recompute, partition.actions()


def _improved_orders(
    case: Case, start: Answer, request: Request, deadline: Deadline, *, most: int = MOST_ACTIONS_OF_SEARCH
) -> Answer | None:
    alone = replace(request, inputs=replace(request.inputs, schedule=SEARCHED.name))
    starts, budget = {CaseKey.of(case): start}, {SEARCHED.name: most}
    return search_cases([case], alone, deadline, upper_us=start.step_us, starts=starts, budget=budget).best


def _search_orders_twice(
    cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float
) -> SearchedCases:
    budget = {SEARCHED.name: min(MOST_ACTIONS_OF_SEARCH, _MOST_ACTIONS_OF_CASE * len(cases))}
    first = search_cases(cases, request, deadline.share(0.5), upper_us=upper_us, budget=budget)
    best = first.best
    if best is None or first.bound_us >= best.step_us:
        return first
    again = _improved_orders(best.case, best, request, deadline)
    if again is None:
        return first
    return first._replace(best=again, answers={**first.answers, CaseKey.of(best.case): again})


def _over_widths(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float) -> SearchedCases:
    # A quick search under 1F1B ranks the combinations of width, replicas and micro-batches. The most promising ones get
    # most of the budget of each schedule.
    is_open = request.inputs.schedule == "auto"
    if request.actions is None if is_open else not any(gains_from_longer_search(case.schedule) for case in cases):
        return search_cases(cases, request, deadline, upper_us=upper_us)
    quick = quick_answers(cases, deadline, upper_us=upper_us)
    estimates_us = {width_replicas_and_micro_batches(answer.case): step_us_without_bubble(answer) for answer in quick}
    if not is_open:
        return _search_ranked(cases, request, deadline, upper_us=upper_us, estimates_us=estimates_us)
    allowed = {case.schedule.name for case in cases}
    quick = [answer for answer in quick if answer.case.schedule.name in allowed]
    fastest = min(quick, key=lambda answer: answer.step_us, default=None)
    upper_us = upper_us if fastest is None else min(upper_us, fastest.step_us)
    cheaper = replace(request, actions=(request.actions or 0) // _FIRST_BUDGET)
    first = search_cases(cases, cheaper, deadline.share(0.5), upper_us=upper_us, estimates_us=estimates_us)
    quickly = {CaseKey.of(answer.case): answer for answer in quick}
    first = first._replace(best=first.best or fastest, answers=fastest_answers(quickly, first.answers))
    is_improvable = first.best is not None and request.searches_longer
    return _improved_schedules(cases, first, request, deadline, estimates_us=estimates_us) if is_improvable else first


def _search_ranked(
    cases: Sequence[Case],
    request: Request,
    deadline: Deadline,
    *,
    upper_us: float,
    estimates_us: Mapping[tuple[int, int, int], float],
) -> SearchedCases:
    name = cases[0].schedule.name
    if name == SEARCHED.name:
        return _search_orders_ranked(cases, request, deadline, upper_us=upper_us, estimates_us=estimates_us)
    named = replace(request, inputs=replace(request.inputs, schedule=name))
    budget = {name: _MOST_ACTIONS_OF_RANKED}
    first = search_cases(cases, named, deadline.share(0.5), upper_us=upper_us, estimates_us=estimates_us, budget=budget)
    return improve_fastest_answers(first, request, deadline) if request.searches_longer else first


def _search_orders_ranked(
    cases: Sequence[Case],
    request: Request,
    deadline: Deadline,
    *,
    upper_us: float,
    estimates_us: Mapping[tuple[int, int, int], float],
) -> SearchedCases:
    shapes = sorted(
        {width_replicas_and_micro_batches(case) for case in cases},
        key=lambda shape: (estimates_us.get(shape, inf), shape),
    )
    near = [case for case in cases if width_replicas_and_micro_batches(case) in shapes[:_MOST_RANKED]]
    far = [case for case in cases if case not in near]
    first = _search_orders_of(near, request, deadline.share(0.5), upper_us=upper_us)
    if first.best is None:
        again = _search_orders_of(far, request, deadline.share(0.5), upper_us=upper_us)
        bounds_us = {SEARCHED.name: min(first.bound_us, again.bound_us)}
        first = SearchedCases(again.best, bounds_us, first.complete and again.complete, again.answers)
        far = []
    if first.best is None:
        return first
    bound_us = min([first.bound_us, *(lower_bound_of_case_us(case, first.best.step_us) for case in far)])
    answers = dict(first.answers)
    nearest = [a for a in answers.values() if a.partition is not None and a.step_us <= first.best.step_us * NEARBY]
    for answer in sorted(nearest, key=lambda answer: answer.step_us)[:_MOST_IMPROVED]:
        answers[CaseKey.of(answer.case)] = _improved_orders(answer.case, answer, request, deadline) or answer
    best = min((a for a in answers.values() if a.partition is not None), key=lambda answer: answer.step_us)
    return SearchedCases(best, {SEARCHED.name: bound_us}, first.complete, answers)


def _search_orders_of(cases: Sequence[Case], request: Request, deadline: Deadline, *, upper_us: float) -> SearchedCases:
    alone = replace(request, inputs=replace(request.inputs, schedule=SEARCHED.name))
    budget = {SEARCHED.name: min(2 * MOST_ACTIONS_OF_SEARCH, _MOST_ACTIONS_OF_CASE * len(cases))}
    return search_cases(cases, alone, deadline, upper_us=upper_us, budget=budget)


def _improved_schedules(
    cases: Sequence[Case],
    first: SearchedCases,
    request: Request,
    deadline: Deadline,
    *,
    estimates_us: Mapping[tuple[int, int, int], float],
) -> SearchedCases:
    # Each schedule gets a short search with the width, replicas and micro-batches of the best plan. The fastest
    # schedules are then searched as if they were requested.
    best, answers, actions = first.best, first.answers, request.actions or 0
    assert best is not None
    shape = width_replicas_and_micro_batches(best.case)
    own_first = {**estimates_us, shape: 0.0}
    alike = [
        case for case in cases if width_replicas_and_micro_batches(case) == shape and has_linear_program(case.schedule)
    ]
    for name in dict.fromkeys(case.schedule.name for case in alike):
        own = [case for case in alike if case.schedule.name == name]
        named = replace(request, inputs=replace(request.inputs, schedule=name), searches_longer=False)
        budget = {name: actions // _SHORT_BUDGET}
        again = search_cases(
            own, named, deadline, upper_us=best.step_us * NEARBY, estimates_us=own_first, budget=budget
        )
        answers = fastest_answers(answers, again.answers)
        best = again.best if again.best is not None and again.best.step_us < best.step_us else best
    for name in fastest_schedules_us(answers.values(), _NEAREST_SCHEDULES):
        own = [case for case in cases if case.schedule.name == name]
        again = _search_ranked(own, request, deadline, upper_us=best.step_us * NEARBY, estimates_us=own_first)
        best = again.best if again.best is not None and again.best.step_us < best.step_us else best
        answers = fastest_answers(answers, again.answers)
    shape, found_us = width_replicas_and_micro_batches(best.case), fastest_us_across_schedules(answers.values())
    own = [case for case in cases if case.schedule.needs_search and width_replicas_and_micro_batches(case) == shape]
    near = [case for case in own if found_us.get(key_without_schedule(case), inf) <= best.step_us * _CLOSE]
    again = _search_orders_of(near, request, deadline.share(0.5), upper_us=best.step_us)
    searched = first._replace(best=again.best or best, answers=fastest_answers(answers, again.answers))
    return _with_own_orders(searched, own, request, deadline)


def _tie_broken(answer: Answer, deadline: Deadline) -> Answer:
    if answer.method != DYNAMIC_PROGRAMMING or answer.case.policy == "layers":
        return answer
    case = answer.case
    try:
        cuts = best_of_equally_fast(case, answer.step_us, deadline=deadline)
    except OutOfTimeError:
        return answer
    return answer if cuts is None else answer._replace(partition=case.partition(cuts.cuts, cuts.choices))


def _plan(answer: Answer, bound_us: float, request: Request, *, named_bound_us: float = 0.0) -> Plan:
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
        # Bounds that are equal within rounding are one bound.
        is_higher = named_bound_us > bound_us * (1 + 1e-6)
        solver = SolverReport(
            method=answer.method,
            status="feasible",
            gap=gap,
            lower_bound_us=bound_us,
            named_lower_bound_us=min(named_bound_us, step_us) if is_higher else 0.0,
        )
    return evaluation.plan(request.inputs, solver)
