"""Search for cuts and recomputed layers together, for GPipe and 1F1B with one stage per device.

Choosing the layers of every possible stage (`cheapest.py`) would take too long. The dynamic program of `chain_dp.py`
therefore runs with lower bounds of the recomputation times (`stage_times.py`). The layers of the stages in its solution
are then chosen exactly, and the dynamic program runs again. The rounds end if all stages in the solution have exact
times, because all other plans take at least their lower bound. Each round makes at least one more stage exact.

Under GPipe the last solution is the optimum. Under 1F1B its time is a lower bound for all partitions. Partitions with a
lower bound below the best step time are then simulated, with exactly chosen layers. If there are too many, a local
search over cuts (`cut_search.py`) improves the best partition instead.

Complexity: that of `planner.solve.chain`, plus one run of `cheapest.py` for each stage whose layers are chosen exactly.
"""

from dataclasses import replace

import numpy as np

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.stage_time import LAYERS
from planner.solve.answer import Answer
from planner.solve.chain.chain_dp import ChainCuts, CutDynamicProgram
from planner.solve.chain.gpipe import DYNAMIC_PROGRAMMING, TableWidth, gpipe_searches
from planner.solve.chain.recurrences import OneForwardOneBackwardRecurrence
from planner.solve.chunks.search import actions_per_descent
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.layers.cut_search import CutAndLayerSearch, LayerRecomputeCandidate, simulate_candidates
from planner.solve.layers.devices import RecomputeSearch
from planner.solve.layers.stage_times import RecomputeTimes
from planner.solve.search_state import BLOCK, SearchState
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator

_ROUNDS_OF_GPIPE = 400
"""Largest number of runs of the dynamic program under GPipe."""

_ROUNDS, _FEW_ROUNDS = 40, 4
"""Largest number of runs of the dynamic program for one lower bound: with an unlimited and with a limited budget."""

_ORDER_COST, _CELLS_PER_ACTION = 3, 5
"""Time to compute an action order, in simulated batches of partitions; and number of table entries that take as long to
compute as one simulated action."""

_MOST_SOLVED, _FEW_SOLVED = 400, 40
"""Limit on the number of stages to choose recomputed layers for: with an unlimited and with a limited budget. Up to
this limit, all partitions that may beat the best one are simulated. Above it, a local search runs instead."""


def search_gpipe_by_layers(case: Case, *, upper_us: float = np.inf, deadline: Deadline = NEVER) -> Answer:
    """Return the fastest partition under GPipe, with recomputation chosen layer by layer.

    Args:
        case: Layers, devices and schedule to plan for.
        upper_us: Step time that a partition must beat, in microseconds.
        deadline: Time at which the search stops.
    """
    layers = RecomputeTimes(case.costs)
    case = replace(case, least_recompute_us=layers.table)
    best: Partition | None = None
    bound_us = case.bound_us
    table_width = TableWidth(case)
    table_width.widen(upper_us)
    try:
        for _ in range(_ROUNDS_OF_GPIPE):
            cuts = _best_cuts(case, table_width.most_layers, upper_us, deadline)
            candidate = None if cuts is None else _solve_layers(case, layers, cuts, deadline)
            partition = None if candidate is None else candidate.partition(case)
            time_us = np.inf if partition is None else Evaluation(case.costs, partition, case.cluster).step_us
            if time_us < upper_us:
                best, upper_us = partition, time_us
            # If the tables have all stages of faster partitions, the solution's time is a bound for all partitions.
            if table_width.widen(upper_us):
                continue
            bound_us = upper_us if cuts is None else max(bound_us, cuts.step_us)
            if bound_us >= upper_us * (1 - 1e-12):
                break
    except OutOfTimeError:
        if best is None:
            raise
    return Answer(case, best, np.inf if best is None else upper_us, min(bound_us, upper_us), DYNAMIC_PROGRAMMING)


def _best_cuts(case: Case, most_layers: int, upper_us: float, deadline: Deadline) -> ChainCuts | None:
    best: ChainCuts | None = None
    for search in gpipe_searches(case, most_layers, deadline):
        best = search.find_best(upper_us=best.step_us if best is not None else upper_us) or best
    return best


def search_one_forward_one_backward_by_layers(state: SearchState, initial: Partition | None) -> None:
    """Search partitions under 1F1B, with recomputation chosen layer by layer.

    `initial` is a partition to start from, which recomputes whole stages; or None.

    Raises:
        OutOfTimeError: The deadline passed.
    """
    layers = RecomputeTimes(state.case.costs)
    case = replace(state.case, least_recompute_us=layers.table)
    for num_stages in range(case.num_devices, 0, -1):
        # Fewer stages take longer.
        if state.case.least_step_us(num_stages) >= state.upper_us:
            return
        initial_here = initial if initial is not None and len(initial.balance) == num_stages else None
        if not _StageCountSearch(state, Evaluator(case, num_stages), layers).run(initial_here):
            return


class _StageCountSearch:
    def __init__(self, state: SearchState, evaluator: Evaluator, layers: RecomputeTimes) -> None:
        self._state, self._evaluator, self._layers = state, evaluator, layers
        self._case = evaluator.case
        self._recurrence = OneForwardOneBackwardRecurrence(self._case.micro_batches)
        self._cuts = CutAndLayerSearch(state, evaluator, RecomputeSearch(evaluator))

    def run(self, initial: Partition | None) -> bool:
        state, budget, case = self._state, self._state.budget, self._case
        table_width = TableWidth(case)
        # The lower bound covers stages in the tables only, so the tables must have all stages of faster plans.
        while table_width.widen(state.upper_us):
            cells = self._evaluator.num_stages * (case.costs.num_layers + 1) * table_width.most_layers
            if not budget.try_reserve((_ORDER_COST + 1) * self._evaluator.num_actions, cells // _CELLS_PER_ACTION):
                self._cuts.search([], actions_per_descent(state, self._evaluator), initial)
                state.record_skipped(max(state.case.least_step_us(self._evaluator.num_stages), case.bound_us))
                return False
            least, search = self._least(table_width.most_layers)
            if least is None:
                continue
            is_open = least.step_us < state.upper_us * (1 - 1e-9)
            if is_open and not self._simulate_below(search):
                starts = {
                    least.cuts,
                    search.prefixes.cuts_with_smallest_maximum("work"),
                    search.prefixes.cuts_with_smallest_maximum("backward"),
                }
                some = [np.array(start) for start in sorted(filter(None, starts)) if min(np.diff(start)) > 0]
                self._cuts.search(some, actions_per_descent(state, self._evaluator), initial)
                state.record_skipped(least.step_us)
        return True

    def _least(self, most_layers: int) -> tuple[ChainCuts | None, CutDynamicProgram]:
        least: ChainCuts | None = None
        for _ in range(_FEW_ROUNDS if self._state.budget.is_bounded else _ROUNDS):
            problem = self._case.chain_problem(self._evaluator.num_stages, most_layers=most_layers, is_count_exact=True)
            search = CutDynamicProgram(problem, self._recurrence, deadline=self._state.deadline)
            least = search.find_best(upper_us=self._state.upper_us)
            solved = self._layers.num_solved_stages
            if least is None:
                break
            candidate = _solve_layers(self._case, self._layers, least, self._state.deadline)
            simulate_candidates(self._state, self._evaluator, [candidate] if candidate else [])
            if self._layers.num_solved_stages == solved:
                break
        return least, search

    def _simulate_below(self, search: CutDynamicProgram) -> bool:
        state = self._state
        most = state.budget.affordable_partitions(self._evaluator)
        if not most:
            return False
        partitions, are_all = search.partitions_below(state.upper_us, most)
        to_solve = {
            (k, *each.cuts[k : k + 2])
            for each in partitions
            for k, choice in enumerate(each.choices)
            if choice == LAYERS
        }
        if len(to_solve) > (_FEW_SOLVED if state.budget.is_bounded else _MOST_SOLVED):
            return False
        for start in range(0, len(partitions), BLOCK):
            block = partitions[start : start + BLOCK]
            candidates = (_solve_layers(self._case, self._layers, cuts, state.deadline) for cuts in block)
            simulate_candidates(state, self._evaluator, [each for each in candidates if each is not None])
        return are_all


def _solve_layers(
    case: Case, layers: RecomputeTimes, cuts: ChainCuts, deadline: Deadline
) -> LayerRecomputeCandidate | None:
    choices = np.array(cuts.choices)
    recomputed: list[tuple[int, ...]] = [()] * len(choices)
    layers_us = np.zeros(len(choices))
    for k in np.flatnonzero(choices == LAYERS).tolist():
        deadline.check()
        points = case.peak_points(len(choices) - 1 - k)
        solved = layers.solve_stage(cuts.cuts[k], cuts.cuts[k + 1], case.limits_bytes[k], points)
        if solved is None:
            return None
        recomputed[k], layers_us[k] = solved.recomputed, solved.recompute_us
        choices[k] = LAYERS if solved.recomputed else 0
    return LayerRecomputeCandidate(
        cuts=np.array(cuts.cuts), choices=choices, recomputed=tuple(recomputed), layers_us=layers_us
    )
