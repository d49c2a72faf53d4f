"""The best plan of one case under a schedule whose step time has no closed form: 1F1B and interleaved 1F1B.

The step time of a partition is that of the simulator, which runs the very action lists of the engine. The search has
a lower bound for all partitions, a few good partitions improved by moving single cuts, and then, for what lies between
the two, every partition whose bound is below the best: if those are few enough to be simulated the answer is proven,
else it comes with the gap between bound and best.

1F1B: the bound is the label programme's optimum under `OneForwardOneBackwardLaw`, and the partitions below the best are
its labels with nothing left out for being dominated. Interleaved: devices hold several chunks, which share memory, so
that the bound counts the work alone, and all partitions are tried where they are few.

Complexity: 1F1B as `planner.solve.chain_dp` for each stage count whose bound is below the best, and O(K M) for every
block of partitions that are simulated at once. Where the effort is bounded, whatever costs more than what is left of it
is not begun: the bound of what was not looked at then stands in for it.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.evaluate import Partition
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE
from planner.core.values.cluster import Cluster
from planner.solve.answer import Answer
from planner.solve.case import Case
from planner.solve.chain_dp import LabelSearch
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.gpipe import Windows
from planner.solve.laws import GPipeLaw, OneForwardOneBackwardLaw
from planner.solve.many import Many
from planner.solve.problem import ChainProblem, prefix
from planner.solve.tables import CHOICES, NOWHERE, allowed_choices

__all__ = ["simulated_answer"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_METHOD = "simulated"
_MOST_SIMULATED = 20_000
"""Partitions that are all simulated to prove the best of them."""

_MOST_ACTIONS = 2_000_000
"""Actions that are simulated in one search, those of up to 1024 partitions at a time counted once: some seconds."""

_PROMISING = 1.15
"""An interleaved plan begins to be improved if it is not slower than the best by more than this."""

_BLOCK = 1024

_FIRST_TIME = 10
"""What it costs to find the order of a schedule's actions, in blocks that are simulated, of 1024 partitions."""

_ORDER, _MOMENTS = 3, 10
"""What it costs to find the order of a schedule's actions, and when chunks hold most: in blocks of few partitions."""

_FEW_BLOCKS = 8
"""Of partitions that a search of bounded effort simulates, to be sure of the best."""

_CELLS, _CHUNK_CELLS = 30, 5
"""Stages in tables of 1F1B and of chunks that take as long to work out as one action."""

_MOVES = (-4, -2, -1, 1, 2, 4)
_ROUNDS = 200


def simulated_answer(
    case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER, most_actions: int | None = None
) -> Answer:
    """The best partition found that beats `upper_us`, and what no partition of the case can beat.

    Args:
        case: The case.
        upper_us: The step time to beat.
        deadline: When the search ends.
        most_actions: All effort there is, in actions simulated; None: as much as it takes, but for simulation itself.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found.
    """
    search = _Search(case, upper_us, deadline, most_actions)
    try:
        (search.one_chunk if case.schedule.is_one_forward_one_backward else search.several_chunks)()
    except OutOfTimeError:
        if search.best is None:
            raise
        search.bound_us = min(search.bound_us, case.bound_us)
    bound_us = min(search.bound_us, search.upper_us)
    step_us = inf if search.best is None else search.upper_us
    return Answer(case, search.best, step_us, bound_us, _METHOD, search.actions_spent)


class _Search:
    def __init__(self, case: Case, upper_us: float, deadline: Deadline, most_actions: int | None) -> None:
        self.case = case
        self.upper_us = upper_us
        self.bound_us = inf
        """Below every partition that was not simulated."""
        self.best: Partition | None = None
        self._deadline = deadline
        self._is_bounded = most_actions is not None
        self._most_actions = _MOST_ACTIONS if most_actions is None else most_actions
        self._actions_left = self._most_actions

    @property
    def actions_spent(self) -> int:
        """The effort so far."""
        return self._most_actions - self._actions_left

    # ---- 1F1B

    def one_chunk(self) -> None:
        law = OneForwardOneBackwardLaw(self.case.micro_batches)
        for count in range(self.case.num_devices, 0, -1):
            if self._least_us(count) >= self.upper_us:
                break  # fewer stages take longer still
            many = Many(self.case, count)
            windows = Windows(self.case)
            while windows.widen(self.upper_us):
                cells = count * (self.case.costs.num_layers + 1) * windows.width
                if not self._pays((_ORDER + 1) * self._actions(many, 1), cells // _CELLS):
                    self.bound_us = min(self.bound_us, max(self._least_us(count), self.case.bound_us))
                    return
                problem = self.case.problem(count, width=windows.width, exact=True)
                search = LabelSearch(problem, law, deadline=self._deadline)
                found = search.best(upper_us=self.upper_us)
                if found is None:
                    continue
                least_us = found.step_us
                self._actions_left -= (_ORDER if self._is_bounded else _FIRST_TIME) * self._actions(many, 1)
                for start in {found.cuts, search.min_max("work"), search.min_max("backward")} - {None}:
                    if self._actions_left > 0 or self.best is None:
                        self._improve_cuts(many, problem, np.array([start]))
                if least_us < self.upper_us * (1 - 1e-9) and not self._all_below(many, search):
                    self.bound_us = min(self.bound_us, least_us)

    def _least_us(self, count: int) -> float:
        """Below every partition into so many stages, and not larger for more of them."""
        pair_us = self.case.costs.forward_us + self.case.costs.backward_us
        speeds = sorted((self.case.cluster.speed(d) for d in range(self.case.num_devices)), reverse=True)
        share_us = max(float(pair_us.sum()) / sum(speeds[:count]), float(pair_us.max()) / speeds[0])
        return self.case.micro_batches * share_us

    def _all_below(self, many: Many, search: LabelSearch) -> bool:
        """Simulates every partition whose bound is below the best; False if they are too many."""
        most = self._affordable(many)
        if not most:
            return False
        partitions, all_of_them = search.all_below(self.upper_us, most)
        for start in range(0, len(partitions), _BLOCK):
            block = partitions[start : start + _BLOCK]
            cuts = np.array([found.cuts for found in block])
            self._take(many, cuts, np.array([found.choices for found in block]))
        return all_of_them

    def _improve_cuts(self, many: Many, problem: ChainProblem, cuts: IntArray) -> None:
        """Moves single cuts as long as that helps; the fastest recomputation that fits is taken everywhere."""
        before = inf
        for _ in range(_ROUNDS):
            step_us = self._take(many, cuts, self._choices(problem, cuts))
            at = int(np.argmin(step_us)) if len(step_us) else 0
            if not len(step_us) or not step_us[at] < before * (1 - 1e-12) or self._actions_left <= 0:
                return
            before, current = float(step_us[at]), cuts[at]
            self._deadline.check()
            cuts = _moved(current)

    def _choices(self, problem: ChainProblem, cuts: IntArray) -> IntArray:
        levels = np.arange(problem.num_stages)[::-1]
        column = cuts[:, :-1] - cuts[:, 1:] + problem.width
        choices = np.full(column.shape, NOWHERE)
        for stage, level in enumerate(levels):
            inside = column[:, stage] >= 0
            table = problem.tables[level][0].choice
            choices[inside, stage] = table[cuts[inside, stage + 1], column[inside, stage]]
        return choices

    # ---- interleaved

    def several_chunks(self) -> None:
        case = self.case
        self._deadline.check()
        costs = case.costs
        # A layer may need less within a stage than alone, but never less than what it holds all the time.
        always = costs.state.always + costs.gradients
        if float(always.max()) > max(case.caps_bytes):
            return
        for count in range(case.num_devices, 0, -1):
            least_us = max(self._least_us(count), case.bound_us)
            if least_us >= self.upper_us:
                break
            many = Many(case, count)
            if not self._pays((_ORDER + _MOMENTS + 1) * self._actions(many, 1), self._cells(many) // _CHUNK_CELLS):
                self.bound_us = min(self.bound_us, least_us)
                return
            try:
                many.actions  # noqa: B018 - whether the schedule runs with so many devices
            except UsageError:
                continue
            balance = case.rules.balance
            if case.costs.num_layers < many.num_stages or (balance and len(balance) != many.num_stages):
                continue
            if self._is_bounded:
                self._actions_left -= (_ORDER + _MOMENTS) * self._actions(many, 1)
            if not self._every_partition(many):
                self._improve_all(many)
                self.bound_us = min(self.bound_us, least_us)

    def _every_partition(self, many: Many) -> bool:
        allowed = allowed_choices(self.case.policy, self.case.micro_batches)
        num_layers, num_stages = self.case.costs.num_layers, many.num_stages
        balance = self.case.rules.balance
        given = None if balance is None else tuple(int(cut) for cut in np.cumsum([0, *balance]))
        count = comb(num_layers - 1, num_stages - 1) if given is None else 1
        if count * len(allowed) ** num_stages > self._affordable(many):
            return False
        all_cuts = _all_cuts(num_layers, num_stages) if given is None else iter([given])
        for block in _blocks(all_cuts, 256):
            cuts = block[self._wanted(block)]
            options = np.array(list(product(allowed, repeat=num_stages)))
            every = np.repeat(cuts, len(options), axis=0)
            choices = np.tile(options, (len(cuts), 1))
            for start in range(0, len(every), _BLOCK):
                self._take(many, every[start : start + _BLOCK], choices[start : start + _BLOCK])
        return True

    def _improve_all(self, many: Many) -> None:
        """Moves single cuts and changes single recomputations, first until it fits, then as long as it is faster."""
        case = self.case
        allowed = np.array(allowed_choices(case.policy, case.micro_batches))
        start = self._start(many)
        if start is None:
            return
        for choice in allowed:
            cuts, choices = start[None], np.full((1, many.num_stages), choice)
            if self._descend(many, cuts, choices, allowed):
                return  # the more is recomputed to begin with, the slower

    def _start(self, many: Many) -> IntArray | None:
        """Fairly even cuts that are wanted; None where there are none."""
        case, count = self.case, many.num_stages
        even = _even(prefix(case.costs.forward_us + case.costs.backward_us), count)
        if self._wanted(even[None])[0]:
            return even
        # As a pipeline of its own, in which everything fits, it has the same rules and the same shares.
        roomy = Cluster(memory_bytes=(2**62,) * count)
        alone = replace(case, schedule=GPIPE, chunks=1, num_devices=count, replicas=1, cluster=roomy)
        problem = alone.problem(count, width=case.costs.num_layers, exact=True)
        cuts = LabelSearch(problem, GPipeLaw(case.micro_batches), deadline=self._deadline).min_max("backward")
        return None if cuts is None else np.array(cuts)

    def _descend(self, many: Many, cuts: IntArray, choices: IntArray, allowed: IntArray) -> bool:
        """From one partition downhill; whether one that fits was reached."""
        before = (inf, inf)
        for _ in range(_ROUNDS):
            self._deadline.check()
            over = np.where(self._wanted(cuts), np.maximum(many.over_bytes(cuts, choices), 0.0), inf)
            least = float(over.min())
            if least == inf:
                break
            near = np.flatnonzero(over <= least)
            if least > 0:
                near = near[:1]  # how fast it is does not matter yet
            step_us = self._simulated(many, cuts[near], choices[near], fits=least == 0)
            at = int(np.argmin(step_us))
            now = (least, float(step_us[at]))
            if not now < before or self._actions_left <= 0:
                break
            before, current, chosen = now, cuts[near[at]], choices[near[at]]
            # What makes it fit makes it no faster.
            if now[1] > self.upper_us * _PROMISING:
                break
            moved = _moved(current)
            # Where everything fits without recomputation, none helps.
            other = _changed(chosen, allowed) if least > 0 or chosen.any() else np.empty((0, len(chosen)), np.int64)
            if not len(moved) + len(other):
                break
            cuts = np.concatenate([moved, np.repeat(current[None], len(other), axis=0)])
            choices = np.concatenate([np.repeat(chosen[None], len(moved), axis=0), other])
        return before[0] == 0

    def _simulated(self, many: Many, cuts: IntArray, choices: IntArray, *, fits: bool) -> FloatArray:
        if fits:
            return self._take(many, cuts, choices, np.zeros(len(cuts)))
        self._actions_left -= self._actions(many, len(cuts))
        return many.step_us(cuts, choices)

    def _wanted(self, cuts: IntArray) -> NDArray[np.bool_]:
        forbidden = np.asarray(self.case.rules.forbids(cuts[:, :-1], cuts[:, 1:]).any(axis=1))
        wanted: NDArray[np.bool_] = ~forbidden
        return wanted

    # ---- both

    def _take(self, many: Many, cuts: IntArray, choices: IntArray, over: FloatArray | None = None) -> FloatArray:
        """Simulates partitions that fit, and keeps the best; the step times, infinite for those that do not fit."""
        step_us = np.full(len(cuts), inf)
        fits: NDArray[np.bool_] = np.asarray((choices != NOWHERE).all(axis=1))
        if not self.case.schedule.is_one_forward_one_backward:
            over = many.over_bytes(cuts, choices) if over is None else over
            fits = fits & (over <= 0)
        if not fits.any():
            return step_us
        self._actions_left -= self._actions(many, int(fits.sum()))
        step_us[fits] = many.step_us(cuts[fits], choices[fits])
        at = int(np.argmin(step_us))
        if step_us[at] < self.upper_us * (1 - 1e-12):
            self.upper_us = float(step_us[at])
            self.best = Partition(
                schedule=self.case.schedule.name,
                micro_batches=self.case.micro_batches,
                balance=tuple(int(n) for n in np.diff(cuts[at])),
                recompute=tuple(CHOICES[c] for c in choices[at]),
                chunks=self.case.chunks,
                replicas=self.case.replicas,
            )
        return step_us

    def _actions(self, many: Many, count: int) -> int:
        return -(-count // _BLOCK) * 2 * self.case.micro_batches * many.num_stages

    def _affordable(self, many: Many) -> int:
        """How many partitions can still be simulated."""
        blocks = max(0, self._actions_left // (2 * self._actions(many, 1)))
        return min(_MOST_SIMULATED, _BLOCK * (min(blocks, _FEW_BLOCKS) if self._is_bounded else blocks))

    def _pays(self, actions: int, tables: int) -> bool:
        """Whether what is left is enough for tables and for simulating so much; then the tables are paid for."""
        if not self._is_bounded:
            return True
        if tables + actions > self._actions_left:
            return False
        self._actions_left -= tables
        return True

    def _cells(self, many: Many) -> int:
        choices = allowed_choices(self.case.policy, self.case.micro_batches)
        return (self.case.costs.num_layers + 1) * many.width * len(choices)


def _moved(cuts: IntArray) -> IntArray:
    """All partitions with one cut moved."""
    num_inner = len(cuts) - 2
    moved = [
        (*cuts[:k], cuts[k] + step, *cuts[k + 1 :])
        for k in range(1, num_inner + 1)
        for step in _MOVES
        if cuts[k - 1] < cuts[k] + step < cuts[k + 1]
    ]
    return np.array(moved, dtype=np.int64).reshape(len(moved), len(cuts))


def _changed(choices: IntArray, allowed: IntArray) -> IntArray:
    """All recomputations with one stage's changed."""
    changed = [
        (*choices[:k], other, *choices[k + 1 :])
        for k in range(len(choices))
        for other in allowed
        if other != choices[k]
    ]
    return np.array(changed, dtype=np.int64).reshape(len(changed), len(choices))


def _even(before: FloatArray, num_stages: int) -> IntArray:
    """Cuts at the even shares of the work, no stage empty."""
    num_layers = len(before) - 1
    cuts = np.searchsorted(before, np.linspace(0, before[-1], num_stages + 1))
    cuts[0], cuts[-1] = 0, num_layers
    places = np.arange(num_stages + 1)
    cuts = np.maximum.accumulate(cuts - places) + places
    ahead = num_layers - num_stages + places
    even: IntArray = np.minimum(cuts, ahead)
    return even


def _all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield 0, *inner, num_layers


def _blocks(cuts: Iterator[tuple[int, ...]], size: int) -> Iterator[IntArray]:
    block = []
    for one in cuts:
        block.append(one)
        if len(block) == size:
            yield np.array(block)
            block = []
    if block:
        yield np.array(block)
