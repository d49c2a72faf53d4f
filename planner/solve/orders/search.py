"""Search for a schedule that the solver makes: cuts, recomputation and action order together.

    cuts, recomputation  ->  action order for them  ->  cuts and recomputation improved under this order  ->  …

The rounds end when one brings no improvement. They start from even cuts, and from the best partition and action orders
of every named schedule with the same placement. If no order is faster, the result is a plan of a named schedule.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import inf

import numpy as np

from planner.core.cost.arrays import IntArray
from planner.core.cost.partition import Partition
from planner.core.cost.simulate import StageTimes
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Action, ListedSchedule
from planner.solve.answer import SAME, Answer
from planner.solve.chunks.cut_search import CutSearch
from planner.solve.chunks.search import start_cuts
from planner.solve.deadline import NEVER, Deadline
from planner.solve.orders.order_problem import OrderProblem, approximate_stage_memory
from planner.solve.orders.order_search import OrderSearch, SimulatedOrder, is_split_backward_costless
from planner.solve.orders.period_bound import least_round_trip_us, lower_bound_of_all_cuts_us
from planner.solve.search_state import SearchState, run_limited_search
from planner.solve.space.case import Case, cuts_and_choices
from planner.solve.space.partitions import Evaluator

Rows = tuple[tuple[Action, ...], ...]
CutsAndChoices = tuple[IntArray, IntArray]
"""Partition: its cuts, and the recompute choice of each stage."""

_ROUNDS = 6
"""Largest number of rounds from one partition. A round searches the action order, then the cuts under this order."""

_SHARE = 6
"""Divisor of the remaining budget, for one search for cuts or for an action order."""

_SHARE_FROM_BEST = 2
"""Divisor of the remaining budget, for one search that improves the action order of a given plan."""

_STRICT_SHARE = 2
"""Ratio of the spent budget to the additional budget of each search without lookahead."""

_GAIN = 5e-3
"""Relative gain above which a search without lookahead is repeated, at most `_ROUNDS` times in all."""

_OF_BOUND = 4
"""The lower bound of all partitions may take the budget spent so far, divided by this number."""


def search_orders(
    case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER, start: Partition | None = None
) -> Answer:
    """Return the best partition found, with its action orders.

    Args:
        case: Layers, devices and schedule to plan for.
        upper_us: Step time to beat, in microseconds.
        deadline: Limits on time and on simulated actions.
        start: Partition to improve; None to search from several partitions.
    """
    return run_limited_search(partial(_search_all, start=start), case, upper_us=upper_us, deadline=deadline)


def _search_all(state: SearchState, start: Partition | None) -> None:
    case = state.case
    if case.is_too_large:
        return
    trip_us = least_round_trip_us(case)
    for num_devices in range(case.num_devices, 0, -1):
        least_us = max(state.case.least_step_us(num_devices), case.bound_us, trip_us)
        if least_us >= state.upper_us or state.budget.left <= 0:
            state.record_skipped(least_us)
            return
        evaluator = Evaluator(case, num_devices)
        if evaluator.has_enough_layers and start is not None:
            if start.num_devices == num_devices:
                _JointSearch(state, evaluator).improve(start)
            state.record_skipped(least_us)
        elif evaluator.has_enough_layers:
            _JointSearch(state, evaluator).search()
            of_all_us = lower_bound_of_all_cuts_us(evaluator, state.upper_us, state.budget.spent // _OF_BOUND)
            state.record_skipped(max(least_us, of_all_us))


class _JointSearch:
    def __init__(self, state: SearchState, evaluator: Evaluator) -> None:
        self._state, self._evaluator = state, evaluator
        self._named = _named_schedule_evaluators(evaluator)
        self._known_orders = [named.actions for named in self._named]
        self._start: Rows | None = None
        """Action order that the next search improves; None to search from known orders and rules."""
        self._order_share = _SHARE
        self._kinds: tuple[bool, ...] = (False, True)
        self._refuses_most_orders = False
        """True if `OrderSearch.refuses_most_orders` was true after one of the searches for orders."""

    def improve(self, start: Partition) -> None:
        self._start = start.actions()
        self._known_orders.insert(0, self._start)
        self._order_share = _SHARE_FROM_BEST
        self._kinds = (not start.schedule_object.splits_backward,)
        self._alternate(cuts_and_choices(start))
        if self._refuses_most_orders:
            most_actions = self._state.budget.spent // _STRICT_SHARE
            for _ in range(_ROUNDS):
                if self._improve_without_lookahead(self._state.best or start, most_actions) <= _GAIN:
                    break

    def search(self) -> None:
        even = start_cuts(self._state, self._evaluator)
        for named in self._named:
            best = self._improve_cuts(named, even)
            if best is not None:
                self._alternate(best)
        for cuts in even[:1]:
            # Choices are tried from the least recomputation on, which is fastest, until one leads to a plan that fits.
            any(
                self._alternate((cuts, np.full(self._evaluator.num_stages, choice)))
                for choice in self._evaluator.allowed
            )

    def _alternate(self, partition: CutsAndChoices) -> bool:
        before_us = inf
        for _ in range(_ROUNDS):
            self._state.deadline.check()
            order = self._find_order(partition)
            if order is None:
                break
            self._start = None if self._start is None else order.rows
            under_order = self._evaluator.with_schedule(ListedSchedule(order.rows))
            cuts, choices = partition
            self._state.simulate_fitting(under_order, cuts[None], choices[None], np.array([True]))
            is_better, before_us = order.period_us < before_us * (1 - 1e-9), order.period_us
            if not is_better or self._state.budget.left <= 0:
                break
            better = self._improve_cuts(under_order, [partition[0]])
            if better is None:
                break
            partition = better
        return before_us < inf

    def _improve_cuts(self, evaluator: Evaluator, starts: Sequence[IntArray]) -> CutsAndChoices | None:
        state = self._state
        own = SearchState(case=evaluator.case, budget=state.budget, deadline=state.deadline, upper_us=inf)
        CutSearch(own, evaluator).search(starts, max(0, state.budget.left) // _SHARE)
        if own.best is None:
            return None
        if own.upper_us < state.upper_us * (1 - SAME):
            state.upper_us, state.best = own.upper_us, own.best
        return cuts_and_choices(own.best)

    def _improve_without_lookahead(self, best: Partition, most_actions: int) -> float:
        # Return the relative gain.
        self._state.deadline.check()
        before_us = self._state.upper_us
        cuts, choices = cuts_and_choices(best)
        problem = _order_problem(self._evaluator, cuts, choices, is_whole=self._kinds[0])
        search = OrderSearch(problem, partial(self._evaluator.fits, cuts, choices))
        budget = self._state.budget
        order = search.improve_without_lookahead(best.actions(), most_actions)
        budget.spent += search.spent
        if order is not None:
            under_order = self._evaluator.with_schedule(ListedSchedule(order.rows))
            self._state.simulate_fitting(under_order, cuts[None], choices[None], np.array([True]))
        return 1 - self._state.upper_us / before_us

    def _find_order(self, partition: CutsAndChoices) -> SimulatedOrder | None:
        evaluator, budget = self._evaluator, self._state.budget
        fits = partial(evaluator.fits, *partition)

        # Whole backwards need no memory between I and W, and may be faster than I and W together.
        best: SimulatedOrder | None = None
        for is_whole in self._kinds:
            problem = _order_problem(evaluator, partition[0], partition[1], is_whole=is_whole)
            if is_whole and best is not None and is_split_backward_costless(problem):
                break
            search = OrderSearch(problem, fits, self._known_orders)
            most = max(0, budget.left) // self._order_share
            order = search.search(most) if self._start is None else search.improve(self._start, most)
            budget.spent += search.spent
            self._refuses_most_orders |= search.refuses_most_orders
            if order is not None and (best is None or order.period_us < best.period_us):
                best = order
        return best


def _named_schedule_evaluators(evaluator: Evaluator) -> list[Evaluator]:
    # GPipe, which has a closed form, is left out, because its order needs too much memory.
    able = []
    for schedule in SCHEDULES.values():
        if not schedule.has_closed_form and schedule.placement == evaluator.case.schedule.placement:
            named = evaluator.with_schedule(schedule)
            with suppress(UsageError):
                able += [named] if named.actions else []
    return able


def _order_problem(evaluator: Evaluator, cuts: IntArray, choices: IntArray, *, is_whole: bool) -> OrderProblem:
    cuts, choices = cuts[None], choices[None]
    busy, split_backward, crossing, own = evaluator.durations(cuts, choices)
    always, allocation_bytes, _ = evaluator.stage_bytes(cuts, choices)
    durations = {
        name: np.broadcast_to(us, choices.shape)[0]
        for name, us in {**busy._asdict(), **split_backward._asdict()}.items()
    }
    return OrderProblem(
        stages_by_device=tuple(evaluator.stages_by_device),
        micro_batches=evaluator.case.micro_batches,
        times=tuple(
            StageTimes(
                **{name: float(us[s]) for name, us in durations.items()},
                send_us=float(crossing[0, s]),
                blocking=bool(evaluator.blocking[s]),
            )
            for s in range(evaluator.num_stages)
        ),
        footprints=tuple(
            approximate_stage_memory(float(always[0, s]), allocation_bytes[0, s], is_whole=is_whole)
            for s in range(evaluator.num_stages)
        ),
        is_whole=(is_whole,) * evaluator.num_stages,
        limits_bytes=evaluator.case.limits_bytes[: evaluator.num_devices],
        between_steps_us=tuple(own[0].tolist()),
    )
