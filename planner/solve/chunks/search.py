"""Search for schedules with several stages (chunks) per device.

The chunks of a device share its memory, so stages cannot be chosen one by one. If there are few partitions, all are
simulated without recomputation. For those that would be the fastest but do not fit, `fitting.py` finds the recompute
choices to simulate. If there are many partitions, a local search (`cut_search.py`) starts from even cuts, from cuts
that minimize the longest backward of any stage, and from cuts with the evenest work of devices (`even_loads.py`). The
linear program (`linear_program.py`) and the work of all layers give the lower bound.

Complexity: O(V K M) numpy operations per 1024 simulated partitions, for V chunks on each of K devices and M
micro-batches.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, islice, product
from math import inf
from typing import NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import prefix_sums
from planner.core.extras import is_installed
from planner.core.schedule import GPIPE
from planner.core.values.cluster import Cluster
from planner.solve.answer import Answer
from planner.solve.chunks.branch_and_bound import BranchAndBound, CutBound
from planner.solve.chunks.cut_search import CutSearch
from planner.solve.chunks.descent import ROWS
from planner.solve.chunks.even_loads import cuts_with_even_loads
from planner.solve.chunks.fitting import RecomputeFitter
from planner.solve.chunks.linear_program import LinearProgram, approximate_num_constraints
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.search_state import BLOCK, SearchState, SimulationBudget, run_limited_search
from planner.solve.space.case import Case, cuts_and_choices
from planner.solve.space.partitions import Evaluator
from planner.solve.space.prefixes import BoundedQuantity, PrefixBounds

_MOST_OF_SEARCH, _SHARE = 20_000, 4
"""Limit on the simulated actions of a local search that leaves devices unused, if the budget is limited; and divisor of
the budget for such a search or for a linear program."""

_MANY_MICRO_BATCHES, _LARGE_SHARE = 4, 2 / 3
"""Smallest ratio of micro-batches to devices for which searches also start from cuts with even work; and share of a
limited budget that one local search may use if this ratio is reached."""

_MOST_OF_SEARCH_ALONE = 400_000
"""Limit on the simulated actions of one descent. Their simulation takes about half a second."""

_LONG_STEP, _ROWS = 1000, 512
"""Smallest number of actions of a long step; and number of cut moves to simulate together for long steps, for
which 512 moves take little longer than 128."""

_MOST_OF_BOUND_ALONE = 400_000
"""Limit on the estimated time to solve a linear program, in simulated actions, if the budget is unlimited."""

_MOST_FROM_BEST = 200_000
"""Limit on the simulated actions of the local search from the partition of the given answer, in `improve_answer`."""

_MOST_OF_BOUND, _ROWS_SQUARED = 10_000, 50
"""Limit on the estimated time to solve a linear program, in simulated actions, if the budget is limited; and divisor in
the estimate r² / `_ROWS_SQUARED` of this time, for r rows."""

_LARGE_BOUND = 100_000
"""Limit on the estimated time to solve a linear program, in simulated actions. At or above this limit, branch and bound
rarely raises the lower bound."""

_ITERATIONS = 20
"""Largest number of simplex iterations per row of a linear program."""

_BRANCHED, _MOST_BRANCHED = 20, 10_000_000
"""Limits of branch and bound: simplex iterations per row of a linear program; iterations times rows (half a second)."""

_LEAST_S = 0.01
"""Shortest time limit for a lower bound, in seconds, if the request has a time limit."""

_ORDER_COST, _PEAK_POINTS_COST = 2, 4
"""Time to compute an action order; and time to find the points in the step at which memory may peak under this order.
Unit: one simulated batch of partitions."""

_CELLS_PER_ACTION = 5
"""Number of table entries that take as long to compute as one simulated action."""

_CUTS_AT_ONCE = 256
"""Largest number of partitions in a block of `all_cuts`."""


def search_chunked_partitions(case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER) -> Answer:
    """Return the best partition found with several stages per device.

    Args:
        case: Layers, devices and schedule to plan for.
        upper_us: Step time that a partition must beat, in microseconds.
        deadline: Time at which the search stops.
    """
    return run_limited_search(_search_all, case, upper_us=upper_us, deadline=deadline)


def _search_all(state: SearchState) -> None:
    budget = state.budget
    bounds: list[_DeviceBound] = []
    try:
        for evaluator, least_us in evaluators_by_devices(state):
            budget.spent += (_ORDER_COST + _PEAK_POINTS_COST) * evaluator.num_actions if budget.is_bounded else 0
            if not _simulate_all(state, evaluator):
                # The smallest bound counts. If no linear program raises one of them, no other needs to be raised.
                is_raised = all(bound.linear is not None for bound in bounds)
                enough_us = min(state.deadline.enough_us, _enough_us(evaluator, bounds))
                bounds.append(_improve(state, evaluator, least_us, needs_linear_program=is_raised, enough_us=enough_us))
        _branch_from_weakest(state, bounds)
    finally:
        state.record_skipped(min((bound.least_us for bound in bounds), default=inf))


def _branch_from_weakest(state: SearchState, bounds: list["_DeviceBound"]) -> None:
    # Only the smallest bound counts, so branch and bound raises others only if they become the smallest one.
    branched: set[int] = set()
    while bounds:
        weakest = min(range(len(bounds)), key=lambda n: bounds[n].least_us)
        evaluator, least_us, linear = bounds[weakest]
        enough_us = min(state.step_to_beat_us, state.deadline.enough_us)
        if linear is None or weakest in branched or least_us >= enough_us:
            return
        branched.add(weakest)
        least_us = max(least_us, branch_and_bound_us(state, evaluator, linear))
        bounds[weakest] = _DeviceBound(evaluator, least_us, linear)


def improve_answer(answer: Answer, *, deadline: Deadline, num_searches: int = 0) -> Answer:
    """Search longer for a faster plan than that of `answer`, by local searches; return the faster answer.

    Args:
        answer: Answer with the partition from which a local search starts.
        deadline: Time at which the search stops.
        num_searches: Number of further local searches, each from the cuts of `start_cuts` with a new random seed.
    """
    start = answer.partition
    assert start is not None
    state = SearchState(case=answer.case, budget=SimulationBudget(None), deadline=deadline, upper_us=answer.step_us)
    with suppress(OutOfTimeError):
        evaluator = Evaluator(answer.case, start.num_devices)
        CutSearch(state, evaluator).search_from(*cuts_and_choices(start), _MOST_FROM_BEST)
        starts = start_cuts(state, evaluator) if num_searches else []
        for seed in range(1, num_searches + 1):
            search = CutSearch(state, evaluator, rows=_rows(evaluator), seed=seed)
            search.search(starts, _MOST_OF_SEARCH_ALONE)
    return answer if state.best is None else answer._replace(partition=state.best, step_us=state.upper_us)


def evaluators_by_devices(state: SearchState) -> Iterator[tuple[Evaluator, float]]:
    """Yield an evaluator and a lower bound of the step time, for each number of devices that may have a better plan."""
    case = state.case
    state.deadline.check()
    if case.is_too_large:
        return
    for num_devices in range(case.num_devices, 0, -1):
        least_us = state.rest_us = max(state.case.least_step_us(num_devices), case.bound_us)
        if least_us >= state.step_to_beat_us:
            return
        evaluator = Evaluator(case, num_devices)
        cells = (case.costs.num_layers + 1) * evaluator.most_layers * len(evaluator.allowed)
        if not state.budget.try_reserve(
            (_ORDER_COST + _PEAK_POINTS_COST + 1) * evaluator.num_actions, cells // _CELLS_PER_ACTION
        ):
            state.record_skipped(least_us)
            return
        if evaluator.can_run:
            yield evaluator, least_us
    state.rest_us = inf


def _simulate_all(state: SearchState, evaluator: Evaluator) -> bool:
    fitting = RecomputeFitter(evaluator)
    if evaluator.num_partitions > state.budget.affordable_partitions(evaluator) or not fitting.is_exhaustive:
        return False
    for block in all_cuts(evaluator):
        # More recomputation is never faster, so the least recomputation gives a lower bound.
        choices = fitting.least_recomputation(len(block))
        cuts = block[state.simulate(evaluator, block, choices) < state.upper_us]
        if not len(cuts):
            continue
        choices = choices[: len(cuts)]
        fits = np.asarray((evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1))
        state.simulate_fitting(evaluator, cuts, choices, fits)
        for start in range(0, len(cuts) - fits.sum(), _CUTS_AT_ONCE):
            some = cuts[~fits][start : start + _CUTS_AT_ONCE]
            if not _simulate_choices(state, evaluator, fitting, some):
                return False
    return True


def _simulate_choices(state: SearchState, evaluator: Evaluator, fitting: RecomputeFitter, cuts: IntArray) -> bool:
    minimal = fitting.minimal_combinations(cuts)
    counts = minimal.sum(axis=2).prod(axis=1, dtype=np.float64)
    if counts.sum() > state.budget.affordable_partitions(evaluator):
        return False
    of_devices = [choice for one in minimal for choice in product(*map(np.flatnonzero, one))]
    every_choices = np.empty((len(of_devices), evaluator.num_stages), dtype=np.int64)
    every_choices[:, evaluator.stages] = fitting.combinations[
        np.array(of_devices, dtype=np.int64).reshape(-1, evaluator.num_devices)
    ]
    every_cuts = np.repeat(cuts, counts.astype(np.int64), axis=0)
    for start in range(0, len(every_cuts), BLOCK):
        part = slice(start, start + BLOCK)
        some = every_cuts[part]
        state.simulate_fitting(evaluator, some, every_choices[part], np.full(len(some), True))
    return True


def all_cuts(evaluator: Evaluator) -> Iterator[IntArray]:
    """Yield the cuts of all allowed partitions, in blocks of shape (partitions, stages + 1)."""
    case, num_stages = evaluator.case, evaluator.num_stages
    num_layers, balance = case.costs.num_layers, case.rules.balance
    inner = combinations(range(1, num_layers), num_stages - 1) if balance is None else [np.cumsum(balance[:-1])]
    rest = iter(inner)
    while block := list(islice(rest, _CUTS_AT_ONCE)):
        every = np.array([(0, *cuts, num_layers) for cuts in block])
        wanted = every[case.rules.allows(every)]
        if len(wanted):
            yield wanted


def actions_per_descent(state: SearchState, evaluator: Evaluator) -> int:
    """Return the number of actions that one local search may simulate."""
    uses_all = evaluator.num_devices == evaluator.case.num_devices
    if not state.budget.is_bounded:
        return _MOST_OF_SEARCH_ALONE if uses_all else _MOST_OF_SEARCH_ALONE // _SHARE
    if uses_all:
        share = _LARGE_SHARE if _is_bound_by_work(evaluator) else 1 / 2
        return min(_MOST_OF_SEARCH_ALONE, int(state.budget.left * share))
    # Plans that leave devices unused are rarely fast.
    return min(_MOST_OF_SEARCH, state.budget.left // _SHARE)


class _DeviceBound(NamedTuple):
    """Lower bound of the step time on one number of devices."""

    evaluator: Evaluator
    least_us: float
    linear: "LinearBound | None"


def _enough_us(evaluator: Evaluator, bounds: Sequence[_DeviceBound]) -> float:
    # The smallest bound counts, and branch and bound rarely raises it if the linear programs are large.
    if linear_program_cost(evaluator) < _LARGE_BOUND:
        return inf
    return min((bound.least_us for bound in bounds), default=inf)


def _improve(
    state: SearchState, evaluator: Evaluator, least_us: float, *, needs_linear_program: bool, enough_us: float
) -> _DeviceBound:
    starts = start_cuts(state, evaluator)
    needs_linear_program = needs_linear_program and least_us < enough_us
    linear = solve_linear_program(state, evaluator, starts, enough_us=enough_us) if needs_linear_program else None
    if linear is not None:
        least_us = max(least_us, linear.solution.bound_us)
        if least_us >= state.step_to_beat_us:
            return _DeviceBound(evaluator, least_us, linear)
    # If time runs out during this search, plans on fewer devices are not searched either.
    fewer = evaluator.num_devices - 1
    fewer_us = max(state.case.least_step_us(fewer), state.case.bound_us) if fewer else inf
    state.rest_us = min(least_us, fewer_us)
    CutSearch(state, evaluator, rows=_rows(evaluator)).search(starts, actions_per_descent(state, evaluator))
    return _DeviceBound(evaluator, least_us, linear)


def _rows(evaluator: Evaluator) -> int:
    return _ROWS if evaluator.num_actions >= _LONG_STEP else ROWS


def linear_program_cost(evaluator: Evaluator) -> int:
    """Estimate the time to solve the linear program, as the number of actions that could be simulated instead."""
    # The time grows approximately with the square of the size.
    return approximate_num_constraints(evaluator) ** 2 // _ROWS_SQUARED


class LinearBound(NamedTuple):
    """Lower bound from a linear program, and a search that can raise this bound."""

    solution: CutBound
    branch_and_bound: BranchAndBound


def solve_linear_program(
    state: SearchState, evaluator: Evaluator, starts: Sequence[IntArray], *, enough_us: float = inf
) -> LinearBound | None:
    """Return a lower bound of the step time of all partitions, from a linear program.

    Return None if the program takes too long, if cuts are fixed, or if HiGHS is not installed.

    Args:
        state: State of the search.
        evaluator: Evaluator for a number of devices.
        starts: Result of `start_cuts`.
        enough_us: Step time above which the lower bound need not be raised, in microseconds.
    """
    budget = state.budget
    size, actions = approximate_num_constraints(evaluator), linear_program_cost(evaluator)
    most = min(_MOST_OF_BOUND, budget.left // _SHARE) if budget.is_bounded else _MOST_OF_BOUND_ALONE
    if evaluator.case.rules.balance is not None or actions > most or not starts or not is_installed("highspy"):
        return None
    budget.spent += actions
    scale_us = state.upper_us if state.upper_us < inf else evaluator.case.bound_us
    search = BranchAndBound(LinearProgram(evaluator, starts[0], scale_us=scale_us))
    limit_s = _bound_limit_s(state)
    upper_us = min(state.step_to_beat_us, enough_us)
    first = search.solve_root(upper_us=upper_us, most_iterations=_ITERATIONS * size, limit_s=limit_s)
    return None if first is None else LinearBound(first, search)


def branch_and_bound_us(state: SearchState, evaluator: Evaluator, linear: LinearBound | None) -> float:
    """Return a lower bound of the step time from branch and bound, in microseconds.

    The result is 0 if `linear` is None, or if the request limits the number of simulated actions.

    Args:
        state: State of the search.
        evaluator: Evaluator for a number of devices.
        linear: Result of `solve_linear_program`.
    """
    if linear is None or state.budget.is_bounded:
        return 0.0
    size = approximate_num_constraints(evaluator)
    most = min(_BRANCHED * size, _MOST_BRANCHED // size)
    return linear.branch_and_bound.branch(state.step_to_beat_us, most_iterations=most, limit_s=_bound_limit_s(state))


def _bound_limit_s(state: SearchState) -> float:
    return max(_LEAST_S, state.deadline.left_s / 4) if state.deadline.is_limited else inf


def start_cuts(state: SearchState, evaluator: Evaluator) -> list[IntArray]:
    """Return cuts from which searches start, such as even cuts; only the fixed cuts if the request fixes them."""
    case, num_stages = evaluator.case, evaluator.num_stages
    if case.rules.balance is not None:
        return [np.array([0, *np.cumsum(case.rules.balance)])]
    even = _even_cuts(prefix_sums(case.costs.forward_us + case.costs.backward_us), num_stages)
    starts = [even] if case.rules.allows(even[None])[0] else []
    # These cuts come from a pipeline with one stage per device, whose memory is unlimited.
    roomy = Cluster(memory_bytes=(2**62,) * num_stages, link=case.cluster.link)
    single = replace(case, schedule=GPIPE, chunks=1, num_devices=num_stages, replicas=1, cluster=roomy)
    problem = single.chain_problem(num_stages, most_layers=evaluator.most_layers, is_count_exact=True)
    backward = {"backward": BoundedQuantity(np.maximum, lambda stages: stages.backward)}
    cuts = PrefixBounds(problem, backward, deadline=state.deadline).cuts_with_smallest_maximum("backward")
    starts += [] if cuts is None else [np.array(cuts)]
    if starts and num_stages > 1 and _is_bound_by_work(evaluator):
        starts.append(cuts_with_even_loads(evaluator, starts[0]))
    return [cuts for n, cuts in enumerate(starts) if not any(np.array_equal(cuts, other) for other in starts[:n])]


def _is_bound_by_work(evaluator: Evaluator) -> bool:
    # With fewer micro-batches, the start and the end of the step matter more than the busiest device.
    return evaluator.case.micro_batches >= _MANY_MICRO_BATCHES * evaluator.num_devices


def _even_cuts(before: FloatArray, num_stages: int) -> IntArray:
    num_layers = len(before) - 1
    cuts = np.searchsorted(before, np.linspace(0, before[-1], num_stages + 1))
    cuts[0], cuts[-1] = 0, num_layers
    # Every cut is at least one layer after the previous one, and leaves a layer for each later stage.
    places = np.arange(num_stages + 1)
    cuts = np.maximum.accumulate(cuts - places) + places
    even: IntArray = np.minimum(cuts, num_layers - num_stages + places)
    return even
