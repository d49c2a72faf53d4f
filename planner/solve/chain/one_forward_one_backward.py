"""Search for the fastest partition under 1F1B, with one stage per device.

The dynamic program with `OneForwardOneBackwardRecurrence` gives a lower bound of each partition's step time. The search
first improves a few good partitions by moving one cut at a time. It then simulates all partitions whose lower bound is
below the best step time found, including dominated ones:

        no partition             simulate the partitions           partitions are slower
    |--------------------|--------------------------------------|------------------------>  lower bound of a partition
    0           smallest lower bound                  best step time found

Complexity: that of `chain_dp.py` for each number of stages whose lower bound is below the best step time. In addition,
O(K M) numpy operations per 1024 simulated partitions, for K stages and M micro-batches.
"""

from math import inf

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.solve.answer import SAME, Answer
from planner.solve.chain.chain_dp import CutDynamicProgram
from planner.solve.chain.gpipe import TableWidth
from planner.solve.chain.recurrences import OneForwardOneBackwardRecurrence
from planner.solve.deadline import NEVER, Deadline
from planner.solve.search_state import BLOCK, SearchState, run_limited_search
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator, move_one_cut
from planner.solve.space.problem import ChainProblem
from planner.solve.space.tables import NO_CHOICE

_ORDER, _FIRST_ORDER = 3, 10
"""Cost of computing an action order, if the budget is limited and if not. Unit: cost of simulating one partition."""

_CELLS = 30
"""Number of table entries that take as long to compute as one simulated action."""

_ROUNDS = 200
"""Largest number of rounds of a local search from one partition. A round moves one cut."""


def search_one_forward_one_backward(case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER) -> Answer:
    """Return the fastest partition found under 1F1B.

    Args:
        case: Layers, devices and schedule to plan for.
        upper_us: Step time that a partition must beat, in microseconds.
        deadline: Time at which the search stops.
    """
    return run_limited_search(_search_all, case, upper_us=upper_us, deadline=deadline)


def _search_all(state: SearchState) -> None:
    for num_stages in range(state.case.num_devices, 0, -1):
        # Fewer stages take longer.
        if state.case.least_step_us(num_stages) >= state.upper_us or not _search_stages(state, num_stages):
            return


def _search_stages(state: SearchState, num_stages: int) -> bool:
    case, budget = state.case, state.budget
    recurrence = OneForwardOneBackwardRecurrence(case.micro_batches)
    evaluator = Evaluator(case, num_stages)
    table_width = TableWidth(case)
    # The lower bound covers stages in the tables only, so the tables must have all stages of faster plans.
    while table_width.widen(state.upper_us):
        cells = num_stages * (case.costs.num_layers + 1) * table_width.most_layers
        if not budget.try_reserve((_ORDER + 1) * evaluator.num_actions, cells // _CELLS):
            state.record_skipped(max(state.case.least_step_us(num_stages), case.bound_us))
            return False
        problem = case.chain_problem(num_stages, most_layers=table_width.most_layers, is_count_exact=True)
        search = CutDynamicProgram(problem, recurrence, deadline=state.deadline)
        least = search.find_best(upper_us=state.upper_us)
        if least is None:
            continue
        budget.spent += (_ORDER if budget.is_bounded else _FIRST_ORDER) * evaluator.num_actions
        # Start with three partitions: the dynamic program's, one with the evenest work, one with the evenest backward.
        for start in {
            least.cuts,
            search.prefixes.cuts_with_smallest_maximum("work"),
            search.prefixes.cuts_with_smallest_maximum("backward"),
        } - {None}:
            if budget.left > 0 or state.best is None:
                _improve_cuts(state, evaluator, problem, np.array([start]))
        is_open = least.step_us < state.upper_us * (1 - 1e-9)
        if is_open and not _simulate_below(state, evaluator, search):
            state.record_skipped(least.step_us)
    return True


def _simulate_below(state: SearchState, evaluator: Evaluator, search: CutDynamicProgram) -> bool:
    most = state.budget.affordable_partitions(evaluator)
    if not most:
        return False
    partitions, are_all = search.partitions_below(state.upper_us, most)
    for start in range(0, len(partitions), BLOCK):
        block = partitions[start : start + BLOCK]
        _simulate_fitting(state, evaluator, np.array([p.cuts for p in block]), np.array([p.choices for p in block]))
    return are_all


def _improve_cuts(state: SearchState, evaluator: Evaluator, problem: ChainProblem, cuts: IntArray) -> None:
    before_us = inf
    for _ in range(_ROUNDS):
        step_us = _simulate_fitting(state, evaluator, cuts, _fastest_fitting_choices(problem, cuts))
        at = int(np.argmin(step_us)) if len(step_us) else 0
        if not len(step_us) or not step_us[at] < before_us * (1 - SAME) or state.budget.left <= 0:
            return
        before_us, current = float(step_us[at]), cuts[at]
        # A round of simulation is slow, so check the time limit before it.
        state.deadline.check()
        cuts = move_one_cut(current)


def _simulate_fitting(state: SearchState, evaluator: Evaluator, cuts: IntArray, choices: IntArray) -> FloatArray:
    # A choice other than `NO_CHOICE` comes from the problem's tables, so the stage fits.
    return state.simulate_fitting(evaluator, cuts, choices, np.asarray((choices != NO_CHOICE).all(axis=1)))


def _fastest_fitting_choices(problem: ChainProblem, cuts: IntArray) -> IntArray:
    column = cuts[:, :-1] - cuts[:, 1:] + problem.most_layers
    choices = np.full(column.shape, NO_CHOICE)
    for stage in range(problem.num_stages):
        inside = column[:, stage] >= 0
        # A level is the number of later stages.
        table = problem.tables[problem.num_stages - 1 - stage][0].choice
        choices[inside, stage] = table[cuts[inside, stage + 1], column[inside, stage]]
    return choices
