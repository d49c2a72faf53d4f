"""Search for the best action order of given stages: try many dispatch rules, then improve the best order step by step.

The budget of the search is a number of scheduled or simulated actions, so the same request gets the same plan on any
machine. An order counts only if it fits according to the exact memory model.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.simulate import StageTimes, period_us
from planner.core.cost.stage_time import SplitBackwardTimes, StageBusyTimes
from planner.core.schedule import Action
from planner.solve.answer import SAME
from planner.solve.orders.list_scheduling import (
    Act,
    ActionOrder,
    DispatchRules,
    apply_rules,
    follow_order,
    split_backwards,
)
from planner.solve.orders.order_changes import critical_actions, merge_or_split_backwards, move_actions
from planner.solve.orders.order_problem import OrderProblem
from planner.solve.orders.period_bound import StageTimeBounds, least_device_spans_us

Rows = tuple[tuple[Action, ...], ...]
_Rows = Sequence[Sequence[Act]]

# Values to try for the fields of `_Tuning`, most promising first.
_WAITING = (1.0, 1.5, 0.8, 1.25, 1.7, 1.9, 2.0, 1.1, 1.35, 1.6, 1.8, 2.3, 3.0, 0.65, 0.5)
_EXTRA = (0, 1, -1)
_PATIENCE = (0.5, 0.0, 1.0, 0.25, 0.75)
_PATIENT = (0.0, 0.25)
_EITHER = (True, False)

_TRY_ACTIONS = 60
"""Constant part of the time to make an order, as the number of actions that can be simulated in this time."""

_CHECK_ORDERS = 1
"""Number of orders that can be made in the time of one check by the exact memory model."""

_LOOKAHEAD = (3, 8, 20)
"""Values for `lookahead` of `follow_order`. All are tried with the known orders; later only the first is used."""

_RULES_SHARE, _PATIENCE_SHARE = 0.3, 0.3
"""Probability that a change affects the rules, not the order; and that a change of the rules affects `patience`."""

_MERGE_SHARE = 0.2
"""Probability that a change of the order merges or splits backwards, if split backwards take longer than whole ones."""

_MOST_CHECKED = 256
"""Number of orders whose result of the exact memory model is stored."""

_REFUSED = 10
"""If more than this number of orders exceed memory for each order that fits, the search rarely improves the plan."""

_CRITICAL_FROM = 0.5
"""If only the exact model checks memory, most moves are of critical actions once this share of the budget is left.

Moves of other actions rarely change the step time, but they prepare moves of critical ones. A search without lookahead
moves critical actions as soon as it has accepted an order.
"""

_WORSE = 5e-4
"""Initial threshold: the search may continue from an order that is slower than the best one by this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOrder:
    """Action order that fits into memory, and its simulated step time."""

    rows: Rows
    period_us: float


class OrderSearch:
    """Search for the best action order of given stages.

    Args:
        problem: The stages with their times and memory.
        fits: Function that returns True if an order fits according to the exact memory model.
        known_orders: Orders to start from, such as those of named schedules; they need not fit.
    """

    def __init__(self, problem: OrderProblem, fits: Callable[[Rows], bool], known_orders: Sequence[Rows] = ()) -> None:
        # Moves often lead to the same order again.
        self._problem, self._fits, self._known_orders = problem, lru_cache(_MOST_CHECKED)(fits), known_orders
        later = tuple(float(len(problem.times) - s) for s in range(len(problem.times)))
        self._shapes = _in_flight_per_round_trip(problem), later, _forwards_per_round_trip(problem)
        self._least_us = estimated_least_period_us(problem)
        self.best: SimulatedOrder | None = None
        self._merges = not is_split_backward_costless(problem)
        self._is_exact = False
        """True if simulations ignore memory, so that only the exact memory model rejects orders.

        The search then continues only from orders that fit.
        """
        self.spent = 0
        """Number of actions scheduled or simulated so far."""
        self._num_fitting = self._num_refused = 0
        """Number of orders that fit, and that do not fit, according to the exact memory model."""
        self._rules_us: dict[DispatchRules, float] = {}
        """Step time of the order that each tried set of rules made; the limit on the step time if it made none."""

    def search(self, most_actions: int) -> SimulatedOrder | None:
        """Return the best order found by simulating at most `most_actions` actions; None if no order fits."""
        self._follow(most_actions)
        if self._is_least():
            return self.best
        tuning, rules, rules_us = _Tuning(), self._make_rules(_Tuning()), inf

        def try_each(changes: Iterable[_Tuning]) -> None:
            nonlocal tuning, rules, rules_us
            for changed in changes:
                made = self._make_rules(changed)
                if self.spent < most_actions and self._keep_if_better(self._apply_rules(made, self._limit_us)):
                    tuning, rules, rules_us = changed, made, self._limit_us

        # Each field is varied after the previous one, in two rounds, because good values depend on the other fields.
        for _ in range(2):
            try_each(tuning._replace(waiting=waiting, shape=shape) for shape in (0, 1) for waiting in _WAITING)
            try_each(
                tuning._replace(waiting=1.0, shape=2, extra=extra, patience=patience)
                for extra, patience in product(_EXTRA, _PATIENT)
            )
            try_each(tuning._replace(extra=extra) for extra in _EXTRA)
            try_each(tuning._replace(patience=patience) for patience in _PATIENCE)
            try_each(tuning._replace(forward_first=first, later_first=later) for first in _EITHER for later in _EITHER)
        if self.best is not None:
            self._threshold_accepting(_acts(self.best.rows), rules, rules_us, most_actions)
        return self.best

    def improve(self, rows: Rows, most_actions: int) -> SimulatedOrder | None:
        """Improve the action orders `rows`, which fit into memory, by simulating at most `most_actions` actions."""
        self._simulate(rows)
        near = follow_order(self._problem, _acts(rows), lookahead=_LOOKAHEAD[0], patience=inf)
        if near is not None and near.period_us <= self._limit_us * (1 + SAME):
            return self.search(most_actions)
        return self._improve_exactly(rows, most_actions, _LOOKAHEAD[0])

    def improve_without_lookahead(self, rows: Rows, most_actions: int) -> SimulatedOrder | None:
        """Improve the action orders `rows` like `improve`, but let no device run an action before its turn.

        With `improve`, a device can run a later action while its next action has to wait. The later action often
        exceeds the device's memory. With this method, the device waits. An order may then become faster only after the
        search has changed it in many places.
        """
        self._simulate(rows)
        return self._improve_exactly(rows, most_actions, lookahead=1)

    @property
    def refuses_most_orders(self) -> bool:
        """True if most orders that the exact memory model checked did not fit into memory."""
        return self._num_refused > _REFUSED * self._num_fitting

    def _improve_exactly(self, rows: Rows, most_actions: int, lookahead: int) -> SimulatedOrder | None:
        self._problem = replace(self._problem, limits_bytes=(inf,) * len(self._problem.limits_bytes))
        self._least_us = estimated_least_period_us(self._problem)
        self._is_exact = True
        self._threshold_accepting(_acts(rows), self._make_rules(_Tuning()), inf, most_actions, lookahead=lookahead)
        return self.best

    def _threshold_accepting(
        self, rows: _Rows, rules: DispatchRules, rules_us: float, most_actions: int, *, lookahead: int = _LOOKAHEAD[0]
    ) -> None:
        # Change the order or the rules step by step, and at first also accept slightly slower orders.
        # Source: threshold accepting, Dueck and Scheuer 1990 (doi:10.1016/0021-9991(90)90201-B).
        rng = random.Random(0)  # noqa: S311 - a fixed seed: the same plan every time
        critical: Sequence[Act] = ()
        critical_from = _CRITICAL_FROM if lookahead > 1 else 1.0
        whole = most_actions - self.spent
        while self.spent < most_actions and not self._is_least():
            is_by_rules = not self._is_exact and rng.random() < _RULES_SHARE
            changed = _change_rules(rules, rng) if is_by_rules else rules
            # An order that takes longer than this limit would be dropped, so its simulation may stop.
            limit_us = self._limit_us * (1 + SAME + _WORSE * max(0.0, (most_actions - self.spent) / whole))
            if is_by_rules:
                limit_us = max(limit_us, rules_us * (1 + SAME))
                order = self._apply_rules(changed, limit_us)
            else:
                is_late = most_actions - self.spent <= whole * critical_from
                preferred = self._change_order(rows, rng, critical if is_late else ())
                order = follow_order(self._problem, preferred, lookahead=lookahead, patience=inf, limit_us=limit_us)
            is_better = self._keep_if_better(order)
            if order is None:
                continue
            if is_by_rules and (is_better or order.period_us <= rules_us * (1 + SAME)):
                rules, rules_us = changed, order.period_us
            left = max(0.0, (most_actions - self.spent) / whole)
            is_close = order.period_us <= self._limit_us * (1 + SAME + _WORSE * left)
            if is_close and (is_better or not self._is_exact or self._fits_like(order, rows)):
                rows = order.rows
                critical = critical_actions(order, len(self._problem.times)) if self._is_exact else ()

    def _change_order(self, rows: _Rows, rng: random.Random, critical: Sequence[Act]) -> list[list[Act]]:
        if self._merges and rng.random() < _MERGE_SHARE:
            return merge_or_split_backwards(self._problem, rows, rng)
        return move_actions(self._problem, rows, rng, critical)

    def _follow(self, most_actions: int) -> None:
        for rows in self._known_orders:
            preferred = [split_backwards(row, self._problem.is_whole) for row in rows]
            for lookahead, patience in product(_LOOKAHEAD, _PATIENCE[:3]):
                if self.spent >= most_actions:
                    return
                order = follow_order(
                    self._problem, preferred, lookahead=lookahead, patience=patience, limit_us=self._limit_us
                )
                self._keep_if_better(order)

    def _apply_rules(self, rules: DispatchRules, limit_us: float) -> ActionOrder | None:
        if self._rules_us.get(rules, 0.0) >= limit_us:
            return None
        order = apply_rules(self._problem, rules, limit_us=limit_us)
        self._rules_us[rules] = limit_us if order is None else order.period_us
        return order

    def _is_least(self) -> bool:
        return self.best is not None and self.best.period_us <= self._least_us * (1 + 1e-9)

    def _make_rules(self, tuning: "_Tuning") -> DispatchRules:
        most = tuple(max(1, ceil(tuning.waiting * number) + tuning.extra) for number in self._shapes[tuning.shape])
        return DispatchRules(
            most_waiting=most,
            patience=(tuning.patience,) * len(self._problem.stages_by_device),
            forward_first=tuning.forward_first,
            later_chunk_first=tuning.later_first,
        )

    @property
    def _limit_us(self) -> float:
        return inf if self.best is None else self.best.period_us

    def _keep_if_better(self, order: ActionOrder | None) -> bool:
        self.spent += 3 * len(self._problem.times) * self._problem.micro_batches + _TRY_ACTIONS
        if order is None or (self.best is not None and order.period_us >= self.best.period_us * (1 - SAME)):
            return False
        return self._simulate(order.actions())

    def _simulate(self, rows: Rows) -> bool:
        found_us = period_us(rows, self._problem.times, self._problem.between_steps_us)
        if (self.best is not None and found_us >= self.best.period_us) or not self._fits_exactly(rows):
            return False
        self.best = SimulatedOrder(rows=rows, period_us=found_us)
        return True

    def _fits_like(self, order: ActionOrder, rows: _Rows) -> bool:
        # Return True if `order` fits. `rows` is known to fit, so an equal order is not checked again.
        return self._count_check(order.rows == rows or self._fits(order.actions()))

    def _fits_exactly(self, rows: Rows) -> bool:
        return self._count_check(self._fits(rows))

    def _count_check(self, fits: bool) -> bool:  # noqa: FBT001 - called by two methods
        self.spent += _CHECK_ORDERS * 3 * len(self._problem.times) * self._problem.micro_batches
        self._num_fitting, self._num_refused = self._num_fitting + fits, self._num_refused + (not fits)
        return fits


class _Tuning(NamedTuple):
    # `DispatchRules.most_waiting` of a stage is ceil(waiting * n) + extra, but at least 1. `shape` selects n:
    #     0  `_in_flight_per_round_trip`
    #     1  number of later stages plus one
    #     2  `_forwards_per_round_trip`
    waiting: float = 1.0
    shape: int = 0
    extra: int = 0
    patience: float = 0.5
    forward_first: bool = False
    later_first: bool = True


def estimated_least_period_us(problem: OrderProblem) -> float:
    """Return an estimate of the least step time. It is not a bound, because the memory of stages is approximate."""

    def each(name: str) -> FloatArray:
        return np.array([[getattr(times, name) for times in problem.times]])

    busy, split_backward = (
        StageBusyTimes(*map(each, StageBusyTimes._fields)),
        SplitBackwardTimes(*map(each, SplitBackwardTimes._fields)),
    )
    times = StageTimeBounds.of(busy, split_backward, each("send_us"), problem.micro_batches)
    footprints = [problem.footprints[stages[0]] for stages in problem.stages_by_device]
    fitting = [
        (limit - f.always) / max(f.held, 1e-9) for limit, f in zip(problem.limits_bytes, footprints, strict=True)
    ]
    most_in_flight = np.clip(np.floor(np.array([fitting]) + 1e-9), 1.0, problem.micro_batches)
    spans_us = least_device_spans_us(times, problem.stages_by_device, problem.micro_batches, most_in_flight)
    return float((spans_us + np.array(problem.between_steps_us)).max())


def _round_trip_us(times: Sequence[StageTimes], stage: int) -> float:
    # Return the least time from the end of a stage's forward until the gradient of its output arrives.
    behind = times[stage + 1 :]
    least_us = sum(t.forward_us + min(t.input_backward_us, t.last_input_backward_us) for t in behind)
    return least_us + 2 * sum(t.send_us for t in times[stage:-1])


def _in_flight_per_round_trip(problem: OrderProblem) -> tuple[float, ...]:
    # For each stage: time from the start of a forward to the end of the same micro-batch's input gradient, divided by
    # the time that the slowest device needs for a micro-batch.
    pace_us = max(
        sum(t.forward_us + t.input_backward_us + t.weight_backward_us for t in (problem.times[s] for s in chunks))
        for chunks in problem.stages_by_device
    )
    if pace_us <= 0:
        return (1.0,) * len(problem.times)
    return tuple(
        (times.forward_us + _round_trip_us(problem.times, stage) + times.input_backward_us) / pace_us
        for stage, times in enumerate(problem.times)
    )


def _forwards_per_round_trip(problem: OrderProblem) -> tuple[float, ...]:
    # Number of forwards that each stage can run until the gradient of a finished forward arrives.
    return tuple(
        _round_trip_us(problem.times, stage) / times.forward_us if times.forward_us else 1.0
        for stage, times in enumerate(problem.times)
    )


def _change_rules(rules: DispatchRules, rng: random.Random) -> DispatchRules:
    if rng.random() < _PATIENCE_SHARE:
        patience = rng.choice((0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.5, inf))
        some = _random_range(len(rules.patience), rng)
        return replace(rules, patience=tuple(patience if d in some else old for d, old in enumerate(rules.patience)))
    some, step = _random_range(len(rules.most_waiting), rng), rng.choice((-1, 1))
    most = tuple(max(1, n + step) if s in some else n for s, n in enumerate(rules.most_waiting))
    return replace(rules, most_waiting=most)


def is_split_backward_costless(problem: OrderProblem) -> bool:
    """Return True if, on every stage, a split backward (I and W) takes no longer than a whole backward (B)."""
    split_backward = ((t.input_backward_us + t.weight_backward_us, t.backward_us) for t in problem.times)
    return all(both_us <= whole_us * (1 + 1e-9) for both_us, whole_us in split_backward)


def _acts(rows: Rows) -> list[list[Act]]:
    return [[(action.stage, action.kind, action.micro_batch) for action in row] for row in rows]


def _random_range(number: int, rng: random.Random) -> range:
    first = rng.randrange(number)
    return range(first, rng.choice((first + 1, first + 1, min(number, first + 2), number)))
