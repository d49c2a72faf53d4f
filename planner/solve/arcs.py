"""The stages that an integer programme chooses from, and a bound that leaves it with few of them.

Every possible stage is an arc of layers first..end-1 on a class of devices. With the letters of docs/cost-model.md, p
and q for the backward of micro-batches 0..M-2 and M-1, and C for the link in front of a stage, a step takes at least

    T >= sum (F + 2 C + min(p, q))  +  U_0  +  (M-1) (max(F, C) + max(p, C))

A plan through an arc has at least the sum of the shortest paths before and behind it, and the maxima of the paths with
the smallest ones, all with the devices there are; arcs for which that is slower than a plan at hand are dropped.

Complexity: O(states · classes · arcs), states being the sets of devices in use.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np

from planner.core.cost.stage_time import optimizer_tail_us
from planner.core.cost.step_time import flow_shop_us
from planner.solve.arrays import FloatArray, IntArray

Plan = tuple[int, ...]
"""Arcs in the order of the chain."""

_RELATIVE = 1e-9
_MAX_WORK = 50_000_000
"""Above so many arcs times states, bounds only count devices: 8 unlike ones and 200 layers are 41 million, 10 s."""
_SCALARS = ("num_layers", "micro_batches", "counts", "ordered")
_WEIGHTS = ((1, 1), (3, 1), (1, 3), (1, 0), (0, 1))
"""A stage's size is weighed so many times forward plus so many times backward, in turn."""
_SLACKS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
"""A plan at hand has stages up to so many times larger than the smallest possible largest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArcProblem:
    """Stages to choose from for a chain of L layers and M micro-batches.

    All arrays have shape (number of arcs,), all times are finite and at least 0. Only arcs that fit the memory are
    listed; arcs with the same layers and device may differ in recomputation.
    """

    num_layers: int
    """L."""
    micro_batches: int
    """M."""
    counts: tuple[int, ...]
    """How many devices there are of each class."""
    ordered: bool
    """Whether class k is place k of the pipeline (K' stages take places 0..K'-1), or any device may run any stage."""
    device: IntArray
    """The class of device."""
    first: IntArray
    """The stage runs layers first..end-1."""
    end: IntArray
    forward_us: FloatArray
    backward_us: FloatArray
    """Micro-batches 0..M-2 take so long each."""
    last_backward_us: FloatArray
    """Micro-batch M-1 takes so long."""
    link_us: FloatArray
    """On the link in front of the stage, for every micro-batch and either direction; not used where first is 0."""
    optimizer_us: FloatArray
    """The optimizer's step of this stage."""
    hidden_us: FloatArray
    """What this stage hides of the optimizers' steps behind it; twice the link behind it comes on top."""

    def take(self, arcs: IntArray) -> "ArcProblem":
        """The same problem with only these arcs."""
        arrays = (field.name for field in fields(self) if field.name not in _SCALARS)
        fewer: dict[str, Any] = {name: getattr(self, name)[arcs] for name in arrays}
        return replace(self, **fewer)

    @property
    def letters(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """F, p, q and C of every arc: a single micro-batch is the last one, and nothing is in front of the chain."""
        p = self.backward_us if self.micro_batches > 1 else self.last_backward_us
        return self.forward_us, p, self.last_backward_us, np.where(self.first > 0, self.link_us, 0.0)


def step_us(problem: ArcProblem, plan: Sequence[int]) -> float:
    """Step time of a plan, see `planner.core.cost.step_time`; infinite without arcs."""
    if not plan:
        return math.inf
    stages = list(zip(*(letter[list(plan)].tolist() for letter in problem.letters), strict=True))
    # A link is a machine in front of its stage; in front of the chain it takes no time.
    forward = [(time, time) for f, _, _, c in stages for time in (c, f)]
    backward = [machine for _, p, q, c in stages for machine in ((c, c), (p, q))]
    # Behind each stage lies the link in front of the next one.
    links_behind = np.array([*(c for _, _, _, c in stages[1:]), 0.0])
    tail = optimizer_tail_us(problem.optimizer_us[list(plan)], problem.hidden_us[list(plan)] + 2 * links_behind)
    num = problem.micro_batches
    return flow_shop_us(forward, num) + flow_shop_us(backward[::-1], num) + float(tail)


def narrow(problem: ArcProblem, upper_us: float) -> tuple[Plan, IntArray, FloatArray]:
    """A good plan, the arcs that one as good and within `upper_us` may have, and a bound for the plans of each arc."""
    best: Plan = ()
    kept = np.arange(len(problem.first))
    while True:
        # Among fewer arcs the same search may find better plans, and those leave fewer arcs.
        plan = tuple(kept[list(_first_plan(problem.take(kept)))].tolist())
        is_better = step_us(problem, plan) < step_us(problem, best) * (1 - _RELATIVE)
        best = plan if is_better else best
        fewer, least_us = prune(problem.take(kept), min(upper_us, step_us(problem, best)))
        kept = kept[fewer]
        if not is_better or not len(kept):
            return best, kept, least_us


def prune(problem: ArcProblem, limit_us: float) -> tuple[IntArray, FloatArray]:
    """The arcs that a plan within `limit_us` may have, and for each a bound on the step time of its plans."""
    kept = np.arange(len(problem.first))
    while True:
        least_us = _least_us(problem.take(kept))
        good = np.isfinite(least_us) & (least_us <= limit_us * (1 + _RELATIVE))
        kept, least_us = kept[good], least_us[good]
        # Without the dropped arcs the bounds of the others rise; at the end each is on some path.
        if good.all():
            return kept, least_us


def _first_plan(problem: ArcProblem) -> Plan:
    """A good plan, or () if none was met: shortest paths over arcs not much larger than a min-max path's."""
    moves = _moves(problem)
    total, forward, backward = _costs(problem)
    plans = set()
    for f, p in _WEIGHTS:
        size = f * forward + p * backward
        least = _paths(problem, moves, (np.maximum, size), backwards=True)[0, 0]
        for slack in _SLACKS:
            allowed = size <= least * slack * (1 + _RELATIVE)
            plans.add(_shortest(problem, moves, np.where(allowed, total, np.inf)))
    # Where devices are only counted, a path may use more of a class than there are.
    good = [plan for plan in plans if _has_devices(problem, plan)]
    return min(good, key=lambda plan: (step_us(problem, plan), plan), default=())


def _costs(problem: ArcProblem) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What an arc adds to the sum of the bound, and its largest machine forward and backward."""
    f, p, q, c = problem.letters
    start = np.where(problem.first == 0, problem.optimizer_us, 0.0)
    return f + 2 * c + np.minimum(p, q) + start, np.maximum(f, c), np.maximum(p, c)


_Move = tuple[int, int, int]
"""A state of which devices are in use, the class of which one more is taken, and the state after."""
_Cost = tuple[np.ufunc, FloatArray]
"""How the costs of a path's arcs are joined, and every arc's."""


def _moves(problem: ArcProblem) -> list[_Move]:
    """From state 0, in which no device is in use, always to a later state."""
    counts = [min(count, problem.num_layers) for count in problem.counts]
    classes = range(len(counts))
    if problem.ordered:
        return [(k, k, k + 1) for k in classes]
    if math.prod(count + 1 for count in counts) * len(problem.first) > _MAX_WORK:
        # How many are in use, of whatever class: fewer states, and no bound that is too high.
        return [(n, t, n + 1) for n in range(sum(counts)) for t in classes]
    number = {used: n for n, used in enumerate(product(*(range(count + 1) for count in counts)))}
    more = [(used, t, (*used[:t], used[t] + 1, *used[t + 1 :])) for used in number for t in classes]
    return [(number[used], t, number[after]) for used, t, after in more if after in number]


def _paths(problem: ArcProblem, moves: Sequence[_Move], cost: _Cost, *, backwards: bool = False) -> FloatArray:
    """Least cost from layer 0 and no device to each state and layer, or from there to layer L; shape (states, L+1)."""
    join, costs = cost
    best = np.full((1 + max(after for _, _, after in moves), problem.num_layers + 1), np.inf)
    best[(slice(None), -1) if backwards else (0, 0)] = 0.0
    begin, end = (problem.end, problem.first) if backwards else (problem.first, problem.end)
    of_class = [np.flatnonzero(problem.device == t) for t in range(len(problem.counts))]
    for state, device, after in reversed(moves) if backwards else moves:
        arcs = of_class[device]
        source, target = (after, state) if backwards else (state, after)
        np.minimum.at(best[target], end[arcs], join(best[source, begin[arcs]], costs[arcs]))
    return best


def _least_us(problem: ArcProblem) -> FloatArray:
    """For each arc a bound on the step time of every plan with it; infinite if there is no such plan."""
    moves, least = _moves(problem), np.full(len(problem.first), np.inf)
    total, forward, backward = _costs(problem)
    costs: list[_Cost] = [(np.add, total), *((np.maximum, part) for part in (forward, backward, forward + backward))]
    tables = [(cost, _paths(problem, moves, cost), _paths(problem, moves, cost, backwards=True)) for cost in costs]
    for state, device, after in moves:
        arcs = np.flatnonzero(problem.device == device)
        total, forward, backward, both = (
            join(join(ahead[state, problem.first[arcs]], cost[arcs]), behind[after, problem.end[arcs]])
            for (join, cost), ahead, behind in tables
        )
        # The largest forward and the largest backward are of one stage or of two: both bounds hold for their sum.
        largest = np.where(np.isfinite(total), np.maximum(forward + backward, both), 0.0)
        least[arcs] = np.minimum(least[arcs], total + (problem.micro_batches - 1) * largest)
    return least


def _shortest(problem: ArcProblem, moves: Sequence[_Move], costs: FloatArray) -> Plan:
    behind = _paths(problem, moves, (np.add, costs), backwards=True)
    plan: list[int] = []
    state = layer = 0
    while layer < problem.num_layers and np.isfinite(behind[0, 0]):
        after = {device: later for now, device, later in moves if now == state}
        arcs = [n for n in np.flatnonzero(problem.first == layer).tolist() if int(problem.device[n]) in after]
        arc = min(arcs, key=lambda n: (costs[n] + behind[after[int(problem.device[n])], problem.end[n]], n))
        plan.append(arc)
        state, layer = after[int(problem.device[arc])], int(problem.end[arc])
    return tuple(plan)


def _has_devices(problem: ArcProblem, plan: Plan) -> bool:
    used = np.bincount(problem.device[list(plan)], minlength=len(problem.counts))
    return bool((used <= problem.counts).all())
