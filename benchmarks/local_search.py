"""Random local search that starts from a plan and uses only the cost model."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.core.cost.partition import Partition
from planner.core.errors import UsageError
from planner.core.schedule import Action, ListedSchedule
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.solve import Request
from planner.solve.cases import cases_of
from planner.solve.space.case import cuts_and_choices
from planner.solve.space.partitions import Evaluator

_ROWS = 128
"""Changes of cuts and recomputation that are simulated at once."""

_WORSE = 5e-4
"""The search continues from partitions slower than the best by less than this, relatively, at the start."""

Rows = tuple[tuple[Action, ...], ...]


def improved_us(profile: Profile, inputs: Inputs, plan: Plan, seconds: float) -> float:
    """Return the step time of the best plan that random changes find from a plan, in microseconds.

    A change moves cuts, recomputes other stages, or moves actions in the order of one or several devices.

    Args:
        profile: The profile.
        inputs: Request of the plan.
        plan: The plan, which recomputes whole stages.
        seconds: CPU time.
    """
    partition, rng = Partition.of(plan, [layer.name for layer in profile.layers]), random.Random(0)  # noqa: S311
    single = replace(inputs, schedule="search", chunks=partition.chunks)
    cases = cases_of(profile, Request(inputs=single, micro_batches=plan.micro_batches))
    case = next(case for case in cases if case.schedule.placement == partition.placement)
    climb = _Climb(Evaluator(case, partition.num_devices), partition, rng)
    begin_s = time.process_time()
    while (left := 1 - (time.process_time() - begin_s) / seconds) > 0:
        climb.limit_us = climb.best_us * (1 + _WORSE * left)
        (climb.change_order if rng.random() < 0.9 else climb.change_cuts)()
    return climb.best_us


class _Climb:
    """State of the search."""

    def __init__(self, evaluator: Evaluator, start: Partition, rng: random.Random) -> None:
        self._random, self._any, self._rows = rng, evaluator, start.actions()
        self._cuts, self._choices = cuts_and_choices(start)
        self._evaluator = evaluator.with_schedule(ListedSchedule(self._rows))
        self.best_us = float(self._evaluator.step_us(self._cuts[None], self._choices[None])[0])
        self.limit_us = self.best_us

    def change_cuts(self) -> None:
        """Try random changes of cuts and recomputation under the current order."""
        rng, num_stages = np.random.default_rng(self._random.randrange(2**32)), len(self._choices)
        cuts, choices = (np.repeat(each[None], _ROWS, axis=0) for each in (self._cuts, self._choices))
        firsts, lengths, index = *rng.integers(1, num_stages, (2, _ROWS, 1)), np.arange(num_stages + 1)
        cuts += ((index >= firsts) & (index < np.minimum(firsts + lengths, num_stages))) * rng.integers(
            -2, 3, (_ROWS, 1)
        )
        flips = rng.random(choices.shape) < 1 / num_stages
        choices = np.where(flips, rng.choice(self._any.allowed, choices.shape), choices)
        keeps = (np.diff(cuts, axis=1) > 0).all(axis=1)
        cuts, choices = cuts[keeps], choices[keeps]
        fits = (self._evaluator.excess_bytes(cuts, choices) <= 0).all(axis=1)
        if not fits.any():
            return
        cuts, choices = cuts[fits], choices[fits]
        step_us = self._evaluator.step_us(cuts, choices)
        at = int(step_us.argmin())
        if step_us[at] <= self.limit_us:
            self._cuts, self._choices = cuts[at], choices[at]
            self.best_us = min(self.best_us, float(step_us[at]))

    def change_order(self) -> None:
        """Try one random change of the action order."""
        rng, rows = self._random, [*map(list, self._rows)]
        device, step = rng.randrange(len(rows)), rng.choice((-6, -4, -3, -2, -1, 1, 2, 3, 4, 6))
        place = rng.randrange(len(rows[device]))
        for each in rng.choice((range(device, device + 1), range(device, len(rows)), range(device + 1))):
            first = min(place, len(rows[each]) - 1)
            rows[each].insert(max(0, first + step), rows[each].pop(first))
        try:
            other = self._any.with_schedule(ListedSchedule(_in_turn(rows)))
            step_us = float(other.step_us(self._cuts[None], self._choices[None])[0])
        except (UsageError, ValueError):
            return  # devices would wait for each other
        if step_us <= self.limit_us and (other.excess_bytes(self._cuts[None], self._choices[None]) <= 0).all():
            self._rows, self._evaluator = other.case.schedule.rows, other
            self.best_us = min(self.best_us, step_us)


def _in_turn(rows: Sequence[Sequence[Action]]) -> Rows:
    """Return the order with ascending micro-batches in every kind of action of a stage."""
    counts: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        for action in row:
            counts.setdefault((action.stage, action.kind), []).append(action.micro_batch)
    turns = {key: iter(sorted(numbers)) for key, numbers in counts.items()}
    return tuple(tuple(Action(a.stage, a.kind, next(turns[a.stage, a.kind])) for a in row) for row in rows)
