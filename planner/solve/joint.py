"""Cuts, recomputation and lists together: a schedule that is made for the stages that it cuts.

    cuts, recomputation  ->  lists made for them  ->  cuts and recomputation improved under these lists  ->  …

until a round brings nothing. It begins with the even cuts, and with the best cuts and lists of every named schedule
that has as many stages on a device in the same places: what is found is never slower than those.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from planner.core.cost.stage_time import CHOICES
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Action, Listed
from planner.solve.arrays import IntArray
from planner.solve.case import Case
from planner.solve.list_scheduling import OrderProblem
from planner.solve.many import Many
from planner.solve.order_search import FoundOrder, Orders
from planner.solve.progress import Progress
from planner.solve.several_chunks import _descend, _start
from planner.solve.tables import allowed_choices

__all__ = ["search_cuts_and_lists"]

Rows = tuple[tuple[Action, ...], ...]

_ROUNDS = 6
"""Times that lists and cuts are improved in turn."""

_SHARE = 4
"""One of so many parts of what effort is left goes into the lists for one partition."""


def search_cuts_and_lists(progress: Progress) -> None:
    """Searches from the most devices down, until the deadline (`OutOfTimeError`) or as long as the effort lasts."""
    case = progress.case
    for num_devices in range(case.num_devices, 0, -1):
        least_us = max(progress.least_us(num_devices), case.bound_us)
        if least_us >= progress.upper_us or progress.effort.left <= 0:
            progress.leave_out(least_us)
            return
        if case.costs.num_layers < num_devices * case.chunks or _is_other_length(case, num_devices):
            continue
        many = Many(case, num_devices)
        named = _named(many)
        models = [under.actions for under in named]
        for start in _good_starts(progress, named):
            _in_turn(progress, many, start, models)
        # The more is recomputed to begin with, the slower: the first that leads to what fits is enough.
        any(_in_turn(progress, many, start, models) for start in _even_starts(progress, many))
        progress.leave_out(least_us)


# Private functions


def _is_other_length(case: Case, num_devices: int) -> bool:
    balance = case.rules.balance
    return balance is not None and len(balance) != num_devices * case.chunks


def _named(many: Many) -> list[Many]:
    """The named schedules that run with these stages in these places; GPipe's lists are good for no memory."""
    able = []
    for schedule in SCHEDULES.values():
        if not schedule.has_closed_form and schedule.placement == many.case.schedule.placement:
            named = many.under(schedule)
            with suppress(UsageError):
                able += [named] if named.actions else []
    return able


def _good_starts(progress: Progress, named: Sequence[Many]) -> Iterator[tuple[IntArray, IntArray]]:
    """Cuts and choices that named schedules are best with."""
    allowed = np.array(allowed_choices(progress.case.policy, progress.case.micro_batches))
    for under in named:
        best = _best_under(progress, under, allowed)
        if best is not None:
            yield best


def _even_starts(progress: Progress, many: Many) -> Iterator[tuple[IntArray, IntArray]]:
    """Even cuts, with the same recomputation everywhere."""
    even = _start(progress, many)
    if even is not None:
        for choice in allowed_choices(progress.case.policy, progress.case.micro_batches):
            yield even, np.full(many.num_stages, choice)


def _best_under(progress: Progress, many: Many, allowed: IntArray) -> tuple[IntArray, IntArray] | None:
    """The partition that a named schedule is best with, as far as is soon seen."""
    start = _start(progress, many)
    if start is None:
        return None
    for choice in allowed:
        reached = _downhill(progress, many, (start, np.full(many.num_stages, choice)), allowed)
        if reached is not None:
            return reached
    return None


def _downhill(
    progress: Progress, many: Many, start: tuple[IntArray, IntArray], allowed: IntArray
) -> tuple[IntArray, IntArray] | None:
    """Where the way downhill ends; None if nothing fits there. The best of all is noted."""
    cuts, choices = start
    own = Progress(case=many.case, effort=progress.effort, deadline=progress.deadline, upper_us=np.inf)
    _descend(own, many, (cuts[None], choices[None]), allowed)
    if own.best is None:
        return None
    if own.upper_us < progress.upper_us * (1 - 1e-12):
        progress.upper_us, progress.best = own.upper_us, own.best
    return np.cumsum([0, *own.best.balance]), np.array([CHOICES.index(choice) for choice in own.best.recompute])


def _in_turn(progress: Progress, whole: Many, start: tuple[IntArray, IntArray], models: Sequence[Rows]) -> bool:
    """Makes lists for the partition and improves it under them, until that brings nothing; whether anything fits."""
    (cuts, choices), case = start, progress.case
    allowed = np.array(allowed_choices(case.policy, case.micro_batches))
    before_us = np.inf
    for _ in range(_ROUNDS):
        progress.deadline.check()
        rows = _lists_for(progress, whole, cuts, choices, models)
        if rows is None:
            break
        many = whole.under(Listed(rows))
        reached = _downhill(progress, many, (cuts, choices), allowed)
        if reached is None:
            break
        cuts, choices = reached
        step_us = float(many.step_us(cuts[None], choices[None])[0])
        is_better, before_us = step_us < before_us * (1 - 1e-9), step_us
        if not is_better or progress.effort.left <= 0:
            break
    return before_us < np.inf


def _lists_for(
    progress: Progress, many: Many, cuts: IntArray, choices: IntArray, models: Sequence[Rows]
) -> Rows | None:
    """The best lists that are found for the partition; None if nothing fits.

    Backwards in one piece hold nothing between halves, and may take less than both together.
    """

    def fits(rows: Rows) -> bool:
        return bool(many.under(Listed(rows)).over_bytes(cuts[None], choices[None])[0] <= 0)

    best: FoundOrder | None = None
    for is_whole in (False, True):
        problem = many.order_problem(cuts, choices, is_whole=is_whole)
        if is_whole and best is not None and _halves_cost_nothing(problem):
            break
        orders = Orders(problem, fits, models)
        found = orders.search(max(0, progress.effort.left) // _SHARE)
        progress.effort.spent += orders.spent
        if found is not None and (best is None or found.period_us < best.period_us):
            best = found
    return None if best is None else best.rows


def _halves_cost_nothing(problem: OrderProblem) -> bool:
    """Whether no stage takes longer for both halves than for a backward in one piece."""
    halves = ((t.input_backward_us + t.weight_backward_us, t.backward_us) for t in problem.times)
    return all(both_us <= whole_us * (1 + 1e-9) for both_us, whole_us in halves)
