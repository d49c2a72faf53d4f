"""Search over all schedules, replicas and micro-batches of a request, and choice of the search functions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from planner.core.extras import is_installed
from planner.core.schedule import GPIPE, SCHEDULES, SEARCHED, Schedule
from planner.core.values.plan import ScheduleName
from planner.solve.answer import Answer, PlanSearch
from planner.solve.chain.gpipe import search_gpipe
from planner.solve.chain.quick import width_replicas_and_micro_batches
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.request import MOST_ACTIONS_OF_AUTO, Request
from planner.solve.space.any_order import least_us_in_any_order
from planner.solve.space.case import Case

MOST_ACTIONS_OF_SEARCH: Final = 1_000_000
"""Usual limit on the actions that a search for action orders simulates, summed over all cases. The search then takes a
few seconds. A later search, which starts from the best plan, has the same limit."""

_NEAR: Final = 1.1
"""Multiple of the best step time so far below which a plan is kept, because a longer search may improve this plan."""

NEARBY: Final = 1.1
"""Multiple of the fastest step time up to which longer searches improve plans. They made plans up to 17 % faster."""

_CLEARLY: Final = 1.01
"""Ratio of step times above which a plan with more chunks per device counts as slower."""

_DESCENTS: Final = 2, 1, 0
"""Number of further local searches in `improve_answer`, for the fastest, second and third fastest plan. Slower plans
are not improved."""

_LEVEL: Final = 1.03
"""Multiple of the fastest step time above which a plan gets no further local searches (`_DESCENTS`)."""


def search_function_for(case: Case, request: Request, start: Answer | None) -> PlanSearch:
    """Return the search function for a case.

    Args:
        case: Layers, devices and schedule to plan for.
        request: The request.
        start: Answer to improve, or None.
    """
    # Import only the search that is needed, so that short requests, such as those of `check`, start quickly.
    if request.solver == "milp":
        from planner.solve.integer import search_integer_program  # noqa: PLC0415

        return search_integer_program
    if case.policy == "layers":
        from planner.solve.layers.search import search_layer_recomputation  # noqa: PLC0415

        return partial(search_layer_recomputation, by_stage=start)
    return search_gpipe if case.schedule.has_closed_form else _simulated_search(case.schedule, start)


def _simulated_search(schedule: Schedule, start: Answer | None) -> PlanSearch:
    if schedule.needs_search:
        from planner.solve.orders.search import search_orders  # noqa: PLC0415

        return search_orders if start is None else partial(search_orders, start=start.partition)
    if schedule.is_one_forward_one_backward:
        from planner.solve.chain.one_forward_one_backward import search_one_forward_one_backward  # noqa: PLC0415

        return search_one_forward_one_backward
    from planner.solve.chunks.search import search_chunked_partitions  # noqa: PLC0415

    return search_chunked_partitions


def lacks_highs(schedules: Iterable[Schedule]) -> bool:
    """Return True if one of the schedules needs HiGHS for good lower bounds, and HiGHS is not installed."""
    return not is_installed("highspy") and any(map(has_linear_program, schedules))


def gains_from_longer_search(schedule: Schedule) -> bool:
    """Return True if a longer search may find faster plans under the schedule."""
    return schedule.needs_search or has_linear_program(schedule)


def has_linear_program(schedule: Schedule) -> bool:
    """Return True if lower bounds for plans under the schedule come from a linear program."""
    return not (schedule.has_closed_form or schedule.needs_search or schedule.is_one_forward_one_backward)


def _action_limits(request: Request) -> dict[ScheduleName, int]:
    # Schedules without an entry have no limit.
    if request.inputs.schedule == SEARCHED.name:
        return {SEARCHED.name: MOST_ACTIONS_OF_SEARCH}
    if request.inputs.schedule != "auto" or request.actions is None:
        return {}
    return {**dict.fromkeys(SCHEDULES, request.actions), SEARCHED.name: request.actions // 4}


def _sort_key_by_bound(case: Case) -> tuple[float, ...]:
    return case.bound_us, case.replicas, case.micro_batches


def _sort_key_by_estimate(case: Case) -> tuple[float, ...]:
    rank = [*SCHEDULES, SEARCHED.name].index(case.schedule.name)
    return rank, case.bound_us if case.schedule.has_closed_form else case.ideal_us, case.replicas, case.micro_batches


class CaseKey(NamedTuple):
    """Schedule and numbers that identify a `Case` of a request."""

    schedule: Schedule
    chunks: int
    replicas: int
    micro_batches: int
    tensor_parallel: int

    @classmethod
    def of(cls, case: Case) -> "CaseKey":
        return cls(case.schedule, case.chunks, case.replicas, case.micro_batches, case.cluster.tensor_parallel)


class SearchedCases(NamedTuple):
    """Result of a search over several schedules and numbers of replicas and micro-batches."""

    best: Answer | None
    bounds_us: Mapping[ScheduleName, float]
    """Lower bound of the step time of all plans, by schedule."""
    complete: bool
    """True if there was time to search all combinations."""
    answers: Mapping[CaseKey, Answer]
    """Answer for each combination that was searched."""

    @property
    def bound_us(self) -> float:
        """Lower bound of the step time of all plans, under any of the schedules."""
        return min(self.bounds_us.values(), default=inf)

    def simplest_answer(self, best: Answer, share: float) -> Answer:
        """Return the answer with the simplest schedule among the answers at most `share` slower than `best`."""
        if not share:
            return best
        # Schedules that come first in `SCHEDULES` count as simpler.
        names, most_us = [*SCHEDULES, SEARCHED.name], best.step_us * (1 + share)
        able = (answer for answer in self.answers.values() if answer.step_us <= most_us)
        return min((best, *able), key=lambda answer: (names.index(answer.case.schedule.name), answer.step_us))


class _Pass:
    def __init__(
        self, cases: Sequence[Case], budget: Mapping[ScheduleName, int], upper_us: float, *, is_ranked: bool
    ) -> None:
        self.left, self.upper_us, self._is_ranked = dict(budget), upper_us, is_ranked
        counts = Counter(case.schedule.name for case in cases)
        self._shares = {name: actions // max(1, counts[name]) for name, actions in budget.items()}
        self.best: Answer | None = None
        self.answers: dict[CaseKey, Answer] = {}
        self.bounds_us: dict[ScheduleName, float] = {}
        self.complete = True

    def is_left_out(self, case: Case) -> bool:
        if case.schedule.needs_search and _has_enough_chunks(case, self.answers):
            return True
        return self._is_ranked and self.left.get(case.schedule.name, 1) <= 0

    def budget_of(self, case: Case) -> int | None:
        name = case.schedule.name
        if name not in self.left:
            return None
        # The most promising cases come first, so each may use half of what is left. A search for action orders uses
        # all of its budget, so its cases get equal shares, unless they are ranked.
        is_shared = case.schedule.needs_search and not self._is_ranked
        return self._shares[name] if is_shared else max(1, self.left[name] // 2)

    def bound(self, case: Case, bound_us: float) -> None:
        self.bounds_us[case.schedule.name] = min(bound_us, self.bounds_us.get(case.schedule.name, inf))

    def record(self, case: Case, answer: Answer | None, least_us: float) -> bool:
        if answer is None:
            self.complete = False
            self.bound(case, least_us)
            return False
        if self.left:
            self.left[case.schedule.name] -= answer.actions
        self.answers[CaseKey.of(case)] = answer
        self.bound(case, max(least_us, answer.lower_bound_us))
        is_best = answer.partition is not None and answer.step_us < self.upper_us
        if is_best:
            self.best, self.upper_us = answer, answer.step_us
        return is_best


def search_cases(
    cases: Sequence[Case],
    request: Request,
    deadline: Deadline,
    *,
    upper_us: float,
    starts: Mapping[CaseKey, Answer] = MappingProxyType({}),
    estimates_us: Mapping[tuple[int, int, int], float] | None = None,
    budget: Mapping[ScheduleName, int] = MappingProxyType({}),
) -> SearchedCases:
    """Search several combinations of schedule, replicas and micro-batches.

    Args:
        cases: The combinations.
        request: The request.
        deadline: Limits on time and on simulated actions.
        upper_us: Step time to beat, in microseconds.
        starts: Answers from which some of the searches start.
        estimates_us: Estimated step time for each tuple of tensor-parallel width, replicas and number of
            micro-batches. The fastest estimates are searched first. Estimates that exceed the best step time found are
            not searched. None: lower bounds decide the order.
        budget: Number of actions to simulate per schedule; if empty, the request decides.

    Returns:
        The best answer, and lower bounds for all combinations.
    """
    is_open = request.inputs.schedule == "auto"
    results = _Pass(cases, budget or _action_limits(request), upper_us, is_ranked=estimates_us is not None)
    # The most promising case comes first, because most other cases have a lower bound above the step time of its plan.
    # If the schedule is `auto`, GPipe comes before all others, because its best plan is found and proven quickly.
    ordered = sorted(cases, key=_sort_key_by_estimate if is_open else _sort_key_by_bound)
    if estimates_us:
        ordered.sort(
            key=lambda case: (
                _sort_key_by_estimate(case)[0],
                estimates_us.get(width_replicas_and_micro_batches(case), inf),
            )
        )
    for n, case in enumerate(ordered):
        upper_us = results.upper_us
        least_us = lower_bound_of_case_us(case, upper_us)
        if least_us >= upper_us:
            continue
        start = starts.get(CaseKey.of(case))
        is_hopeless = not case.schedule.has_closed_form and case.ideal_us >= upper_us and start is None
        is_slower = (
            estimates_us is not None
            and results.best is not None
            and estimates_us.get(width_replicas_and_micro_batches(case), inf) >= results.best.step_us
        )
        if (is_open and results.left and is_hopeless) or is_slower or results.is_left_out(case):
            results.bound(case, least_us)  # The case is skipped, but its lower bound still counts.
            continue
        # Cases without time left count with a weak bound that ignores memory. Reserve half of the time for them.
        share = deadline.share(0.5) if any(other.bound_us < upper_us for other in ordered[n + 1 :]) else deadline
        search, near_us = search_function_for(case, request, start), _us_to_beat(upper_us, case, request)
        most_actions, enough_us = results.budget_of(case), min(results.bounds_us.values(), default=inf)
        limits = replace(share, most_actions=most_actions, best_us=upper_us, enough_us=enough_us)
        answer = _answer(search, case, upper_us=near_us, deadline=limits)
        if results.record(case, answer, least_us):
            deadline.report_plan(results.upper_us, case.schedule.name)
    searched = SearchedCases(results.best, results.bounds_us, results.complete, results.answers)
    return (
        improve_fastest_answers(searched, request, deadline)
        if request.searches_longer and not results.left
        else searched
    )


def _answer(search: PlanSearch, case: Case, *, upper_us: float, deadline: Deadline) -> Answer | None:
    # Each search does some work before its own first check. Without a plan, this work may find one.
    if deadline.watch.is_stopped() or (deadline.best_us < inf and deadline.left_s < 0):
        return None
    try:
        return search(case, upper_us=upper_us, deadline=deadline)
    except OutOfTimeError:
        return None


def _has_enough_chunks(case: Case, answers: Mapping[CaseKey, Answer]) -> bool:
    # If one chunk less per device was slower than two less, more chunks are rarely faster.
    key = CaseKey.of(case)
    fewer, fewest = (answers.get(key._replace(chunks=case.chunks - n)) for n in (1, 2))
    return fewer is not None and fewest is not None and fewer.step_us > fewest.step_us * _CLEARLY


def lower_bound_of_case_us(case: Case, upper_us: float) -> float:
    """Return a lower bound of the step time of all plans of a case, in microseconds.

    The result is the larger of two lower bounds. The second one is not computed if the first one is at least
    `upper_us`, or if the step time of the schedule has a closed form.
    """
    if case.bound_us >= upper_us or case.schedule.has_closed_form:
        return case.bound_us
    return max(case.bound_us, least_us_in_any_order(case))


def lower_bound_of_named_schedules_us(
    cases: Sequence[Case], searched: SearchedCases, request: Request, deadline: Deadline
) -> float:
    """Return a lower bound of the step time of plans with a named schedule (any except `search`), in microseconds.

    Return 0 if the best plan is proven optimal, if the request fixes the schedule or the cuts, or if
    `request.searches_longer` is False.

    Args:
        cases: All cases of a request, including those with the schedule `search`.
        searched: Result of the search over these cases, with a plan.
        request: The request.
        deadline: Time limit for raising the bounds that the search found.
    """
    assert searched.best is not None
    upper_us, is_open = searched.best.step_us, request.inputs.schedule == "auto" and request.balance is None
    if not (is_open and request.searches_longer) or searched.bound_us >= upper_us:
        return 0.0
    from planner.solve.chunks.case_bounds import raised_lower_bound_us  # noqa: PLC0415

    named = [(case, _known_bound_us(case, searched, upper_us)) for case in cases if not case.schedule.needs_search]
    least_us = min((known_us for case, known_us in named if not has_linear_program(case.schedule)), default=upper_us)
    raisable = ((case, known_us) for case, known_us in named if has_linear_program(case.schedule))
    return raised_lower_bound_us(raisable, min(least_us, upper_us), deadline)


def _known_bound_us(case: Case, searched: SearchedCases, upper_us: float) -> float:
    answer = searched.answers.get(CaseKey.of(case))
    known_us = answer.lower_bound_us if answer is not None and answer.case.policy == case.policy else 0.0
    return max(known_us, lower_bound_of_case_us(case, upper_us))


def _us_to_beat(upper_us: float, case: Case, request: Request) -> float:
    # A longer search may improve plans that are slightly slower than the fastest one.
    return upper_us * _NEAR if request.searches_longer and gains_from_longer_search(case.schedule) else upper_us


def improve_fastest_answers(searched: SearchedCases, request: Request, deadline: Deadline) -> SearchedCases:
    """Search longer from the fastest plans, unless the best plan is optimal; return the improved results."""
    best, answers = searched.best, dict(searched.answers)
    if best is None or searched.bound_us >= best.step_us:
        return searched
    from planner.solve.chunks.search import improve_answer  # noqa: PLC0415

    able = [a for a in answers.values() if has_linear_program(a.case.schedule) and a.case.policy != "layers"]
    near = sorted((a for a in able if a.partition is not None), key=lambda answer: answer.step_us)
    for answer, most in zip(near, _DESCENTS, strict=False):
        if answer.step_us > best.step_us * NEARBY:
            break
        is_short = request.inputs.schedule == "auto" and (request.actions or 0) < MOST_ACTIONS_OF_AUTO
        num_searches = 0 if is_short or answer.step_us > best.step_us * _LEVEL else most
        better = answers[CaseKey.of(answer.case)] = improve_answer(answer, deadline=deadline, num_searches=num_searches)
        best = better if better.step_us < best.step_us else best
    return searched._replace(best=best, answers=answers)


def fastest_schedules_us(answers: Iterable[Answer], most: int) -> dict[ScheduleName, float]:
    """Return step times of the fastest schedules, at most `most`, for which `has_linear_program` is true."""
    found_us: dict[ScheduleName, float] = {}
    for answer in answers:
        if answer.partition is not None and has_linear_program(answer.case.schedule):
            name = answer.case.schedule.name
            found_us[name] = min(answer.step_us, found_us.get(name, inf))
    return dict(sorted(found_us.items(), key=lambda item: item[1])[:most])


def key_without_schedule(case: Case) -> tuple[object, ...]:
    """Return a key of a case. The key contains the schedule's placement of stages, but not the schedule.

    Two cases with different schedules have the same key if they place the stages alike and agree in the other fields of
    `CaseKey`.
    """
    return CaseKey.of(case)._replace(schedule=GPIPE), case.schedule.placement


def fastest_us_across_schedules(answers: Iterable[Answer]) -> dict[tuple[object, ...], float]:
    """Return the best step time found for each `key_without_schedule`, in microseconds."""
    found_us: dict[tuple[object, ...], float] = {}
    for answer in answers:
        if answer.partition is not None:
            key = key_without_schedule(answer.case)
            found_us[key] = min(answer.step_us, found_us.get(key, inf))
    return found_us


def fastest_answers(*searches: Mapping[CaseKey, Answer]) -> Mapping[CaseKey, Answer]:
    """Return the fastest answer of each case from several searches."""
    faster: dict[CaseKey, Answer] = {}
    for answers in searches:
        for key, answer in answers.items():
            if key not in faster or answer.step_us < faster[key].step_us:
                faster[key] = answer
    return faster
