"""Search for plans in which stages may recompute some of their layers.

The search starts from the best plan that recomputes whole stages, so its result is never slower. If there are few
partitions, all are simulated without recomputation. Recomputation never makes them faster, so these are lower bounds.
"""

from functools import partial
from math import inf

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.partition import Partition
from planner.solve.answer import Answer
from planner.solve.chunks.search import (
    actions_per_descent,
    all_cuts,
    branch_and_bound_us,
    evaluators_by_devices,
    solve_linear_program,
    start_cuts,
)
from planner.solve.deadline import NEVER, Deadline
from planner.solve.layers.cut_search import CutAndLayerSearch
from planner.solve.layers.devices import RecomputeSearch
from planner.solve.layers.joint import search_gpipe_by_layers, search_one_forward_one_backward_by_layers
from planner.solve.search_state import SearchState, run_limited_search
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator
from planner.solve.space.tables import max_stage_layers

_SHARE = 4
"""Divisor of the remaining budget: the quotient is the budget of `_simulate_all`, which chooses the recomputed layers
of one partition after another."""


def search_layer_recomputation(
    case: Case, by_stage: Answer | None, *, upper_us: float = inf, deadline: Deadline = NEVER
) -> Answer:
    """Return the best partition found in which stages may recompute some of their layers.

    Args:
        case: Case whose policy allows recomputation layer by layer.
        by_stage: Answer to start from, with recomputation of whole stages only; or None.
        upper_us: Step time to beat; at most the step time of `by_stage`.
        deadline: Limits on time and on simulated actions.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found, and `upper_us` is infinite.
    """
    if case.schedule.has_closed_form:
        return search_gpipe_by_layers(case, upper_us=upper_us, deadline=deadline)
    if by_stage is not None and _surely_fits_without_recomputation(case, upper_us):
        return by_stage._replace(actions=0)
    search = _search_devices
    if case.schedule.needs_search:
        search = _choose_layers_under_order
    elif case.schedule.is_one_forward_one_backward:
        search = search_one_forward_one_backward_by_layers
    initial = None if by_stage is None else by_stage.partition
    return run_limited_search(partial(search, initial=initial), case, upper_us=upper_us, deadline=deadline)


def _search_devices(state: SearchState, initial: Partition | None) -> None:
    for evaluator, least_us in evaluators_by_devices(state):
        initial_here = initial if initial is not None and initial.num_devices == evaluator.num_devices else None
        state.record_skipped(_search(state, evaluator, least_us, initial_here))


def _surely_fits_without_recomputation(case: Case, upper_us: float) -> bool:
    if case.schedule.needs_search:
        return False
    most_layers = max_stage_layers(case.costs, longest_us=case.stage_time_limit_us(upper_us), limit_bytes=inf)
    if case.schedule.has_known_peak_points:
        return case.memory_table(most_layers, case.num_devices - 1).most_bytes_without_recompute() <= min(
            case.limits_bytes
        )
    # Every chunk is assumed to be the largest possible stage, so the result may be False although all plans fit.
    counts = [n for n in range(1, case.num_devices + 1) if case.least_step_us(n) < upper_us]
    return all(_holds_all(Evaluator(case, num_devices), most_layers) for num_devices in counts)


def _holds_all(evaluator: Evaluator, most_layers: int) -> bool:
    if not evaluator.can_run:
        return True
    if most_layers > evaluator.most_layers:
        return False
    most_bytes = np.where(
        np.isfinite(evaluator.stage_allocation_bytes[0]), evaluator.stage_allocation_bytes[0], 0.0
    ).max(axis=(0, 1))
    held = [
        float((most_bytes[0] + counts @ most_bytes[1:]).sum(axis=1).max())
        for counts in evaluator.peak_allocation_counts
    ]
    return all(most <= limit for most, limit in zip(held, evaluator.case.limits_bytes, strict=False))


def _choose_layers_under_order(state: SearchState, initial: Partition | None) -> None:
    state.deadline.check()
    state.record_skipped(state.case.bound_us)
    if initial is None:
        return
    evaluator = Evaluator(state.case, initial.num_devices).with_schedule(initial.schedule_object)
    CutAndLayerSearch(state, evaluator, RecomputeSearch(evaluator)).search(
        [], actions_per_descent(state, evaluator), initial
    )


def _search(state: SearchState, evaluator: Evaluator, least_us: float, initial: Partition | None) -> float:
    search = CutAndLayerSearch(state, evaluator, RecomputeSearch(evaluator))
    starts = start_cuts(state, evaluator)
    one_by_one_us = _simulate_all(state, evaluator, search)
    least_us = max(least_us, one_by_one_us)
    linear = solve_linear_program(state, evaluator, starts) if least_us < state.upper_us else None
    if linear is not None:
        least_us = max(least_us, linear.solution.bound_us)
        starts = starts if linear.solution.cuts is None else [linear.solution.cuts, *starts]
    if least_us >= state.step_to_beat_us:
        return least_us
    search.search(starts, actions_per_descent(state, evaluator), initial)
    return max(least_us, branch_and_bound_us(state, evaluator, linear))


def _simulate_all(state: SearchState, evaluator: Evaluator, search: CutAndLayerSearch) -> float:
    budget = state.budget
    if evaluator.num_partitions > budget.affordable_partitions(evaluator):
        return 0.0
    ends = budget.spent + max(0, budget.left) // _SHARE
    step_us, cuts = _partitions_that_need_recomputation(state, evaluator)
    for at in range(len(cuts)):
        if step_us[at] >= state.upper_us or budget.spent >= ends:
            break
        search.evaluate([cuts[at]])
    # No partition that needs recomputation is faster than the fastest one without it.
    return float(step_us[0]) if len(cuts) else inf


def _partitions_that_need_recomputation(state: SearchState, evaluator: Evaluator) -> tuple[FloatArray, IntArray]:
    times: list[FloatArray] = []
    partitions: list[IntArray] = []
    for cuts in all_cuts(evaluator):
        choices = np.full((len(cuts), evaluator.num_stages), evaluator.allowed[0])
        step_us = state.simulate(evaluator, cuts, choices)
        fits = np.asarray((evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1))
        state.simulate_fitting(evaluator, cuts, choices, fits & (step_us < state.upper_us))
        is_open = ~fits & (step_us < state.upper_us)
        times.append(step_us[is_open])
        partitions.append(cuts[is_open])
    if not times:
        return np.zeros(0), np.zeros((0, evaluator.num_stages + 1), dtype=np.int64)
    order = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(times)[order], np.concatenate(partitions)[order]
