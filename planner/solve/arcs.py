"""The stages that an integer programme chooses from, and bounds that leave it with few of them.

Every possible stage is an arc of layers first..end-1 on a class of devices. Arcs that can be in no plan better than one
at hand are dropped: a plan through an arc takes at least the shortest paths before and behind it, plus the smallest
possible largest stages (min-max paths), all with the devices there are.

Complexity: O(states · classes · arcs), states being the sets of devices in use.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.step_time import flow_shop_us

__all__ = ["ArcProblem", "Plan", "StepCosts", "backward_us_of", "link_us_of", "narrow", "step_us", "timed"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Plan = tuple[int, ...]
"""Arcs in the order of the chain."""

_RELATIVE = 1e-9
_MAX_WORK = 50_000_000
"""Above so many arcs times states, bounds only count devices: 8 unlike ones and 200 layers are 41 million, 10 s."""
_SCALARS = ("num_layers", "micro_batches", "counts", "ordered")


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
    """Of micro-batches 0..M-2."""
    last_backward_us: FloatArray
    """Of micro-batch M-1."""
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


def step_us(problem: ArcProblem, arcs: Sequence[int]) -> float:
    """Step time of the plan of these arcs, in the order of the chain; see `planner.core.cost.step_time`."""
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    tail = hidden = 0.0
    for place, arc in enumerate(arcs):
        if place > 0:
            link = float(problem.link_us[arc])
            forward.append((link, link))
            backward.append((link, link))
            hidden += 2 * link
        forward.append((float(problem.forward_us[arc]),) * 2)
        backward.append((float(problem.backward_us[arc]), float(problem.last_backward_us[arc])))
        tail = max(tail, float(problem.optimizer_us[arc]) - hidden)
        hidden += float(problem.hidden_us[arc])
    num = problem.micro_batches
    return flow_shop_us(forward, num) + flow_shop_us(backward[::-1], num) + tail


def timed(problem: ArcProblem, arcs: Plan) -> tuple[float, Plan]:
    """A plan with its step time, infinite if it is none."""
    return step_us(problem, arcs) if arcs else math.inf, arcs


class StepCosts(NamedTuple):
    """Per arc, what it adds to the step of any plan: every machine's time, and more for the largest machine."""

    total: FloatArray
    """Goes with (M-1) max F + (M-1) max p: the last micro-batch waits at the largest machine and runs free from there,
    which is at least the smaller of p and q everywhere."""
    waiting: FloatArray
    """Goes with (M-1) max F + (M-2) max p: it waits at the stage in front of all."""
    forward: FloatArray
    backward: FloatArray
    """The larger of stage and link."""

    @classmethod
    def of(cls, problem: ArcProblem) -> "StepCosts":
        p, q, link = backward_us_of(problem), problem.last_backward_us, link_us_of(problem)
        both_ways = problem.forward_us + 2 * link
        # The optimizer's step of the stage in front of all is hidden by nothing.
        start = np.where(problem.first == 0, problem.optimizer_us, 0.0)
        total = both_ways + np.minimum(p, q) + start
        waiting = both_ways + p + start + np.where(problem.first == 0, q, 0.0)
        if problem.micro_batches == 1:
            waiting = total
        return cls(total, waiting, np.maximum(problem.forward_us, link), np.maximum(p, link))


def backward_us_of(problem: ArcProblem) -> FloatArray:
    """Backward of a micro-batch that is not the last, shape (arcs,); a single micro-batch is the last one."""
    return problem.backward_us if problem.micro_batches > 1 else problem.last_backward_us


def link_us_of(problem: ArcProblem) -> FloatArray:
    """Time on the link in front of each stage, shape (arcs,); 0 in front of the chain."""
    return np.where(problem.first > 0, problem.link_us, 0.0)


class _Move(NamedTuple):
    state: int
    device: int
    next_state: int


class _States(NamedTuple):
    """Which devices are in use; an arc leads from a state to one with a larger number."""

    num: int
    moves: tuple[_Move, ...]
    arcs: tuple[IntArray, ...]
    """The arcs of each class of device."""

    @classmethod
    def of(cls, problem: ArcProblem) -> "_States":
        arcs = tuple(np.flatnonzero(problem.device == t) for t in range(len(problem.counts)))
        if problem.ordered:
            return cls(len(arcs) + 1, tuple(_Move(k, k, k + 1) for k in range(len(arcs))), arcs)
        counts = [min(count, problem.num_layers) for count in problem.counts]
        if math.prod(count + 1 for count in counts) * len(problem.first) > _MAX_WORK:
            # How many are in use, of whatever class: fewer states, and no bound that is too high.
            moves = tuple(_Move(s, t, s + 1) for s in range(sum(counts)) for t in range(len(counts)))
            return cls(sum(counts) + 1, moves, arcs)
        numbers = {used: n for n, used in enumerate(product(*(range(count + 1) for count in counts)))}
        moves = tuple(
            _Move(n, t, numbers[*used[:t], used[t] + 1, *used[t + 1 :]])
            for used, n in numbers.items()
            for t, count in enumerate(counts)
            if used[t] < count
        )
        return cls(len(numbers), moves, arcs)


_Join = Callable[[FloatArray, FloatArray], FloatArray]


def _ahead(problem: ArcProblem, states: _States, costs: FloatArray, join: _Join) -> FloatArray:
    """Smallest cost of a path from layer 0, with no device in use, to each state and layer; shape (states, L+1)."""
    best = np.full((states.num, problem.num_layers + 1), np.inf)
    best[0, 0] = 0.0
    for state, device, next_state in states.moves:
        arcs = states.arcs[device]
        through = join(best[state, problem.first[arcs]], costs[arcs])
        np.minimum.at(best[next_state], problem.end[arcs], through)
    return best


def _behind(problem: ArcProblem, states: _States, costs: FloatArray, join: _Join) -> FloatArray:
    """Smallest cost of a path from each state and layer to layer L; shape (states, L+1)."""
    best = np.full((states.num, problem.num_layers + 1), np.inf)
    best[:, -1] = 0.0
    for state, device, next_state in reversed(states.moves):
        arcs = states.arcs[device]
        through = join(best[next_state, problem.end[arcs]], costs[arcs])
        np.minimum.at(best[state], problem.first[arcs], through)
    return best


def narrow(problem: ArcProblem, upper_us: float) -> tuple[Plan, IntArray, FloatArray]:
    """A good plan, the arcs that one as good and within `upper_us` may have, and a bound for the plans of each arc."""
    best: Plan = ()
    kept = np.arange(len(problem.first))
    while True:
        # Among fewer arcs the same search may find better plans, and those leave fewer arcs.
        found = tuple(int(kept[n]) for n in _first_plan(problem.take(kept)))
        improved = timed(problem, found)[0] < timed(problem, best)[0] * (1 - _RELATIVE)
        best = found if improved else best
        at_hand_us = timed(problem, best)[0]
        fewer, least_us = _prune(problem.take(kept), min(upper_us, at_hand_us) * (1 + _RELATIVE))
        kept = kept[fewer]
        if not improved or not len(kept):
            return best, kept, least_us


def _prune(problem: ArcProblem, limit_us: float) -> tuple[IntArray, FloatArray]:
    """The arcs that a plan within `limit_us` may have, and for each a bound on the step time of its plans."""
    kept = np.arange(len(problem.first))
    while True:
        fewer = problem.take(kept)
        least_us = _least_us(fewer)
        good = np.isfinite(least_us) & (least_us <= limit_us)
        kept, least_us = kept[good], least_us[good]
        # Without the dropped arcs the bounds of the others rise; at the end each is on some path.
        if good.all():
            return kept, least_us


def _least_us(problem: ArcProblem) -> FloatArray:
    """For each arc a bound on the step time of every plan with it; infinite if there is no such plan."""
    costs, states = StepCosts.of(problem), _States.of(problem)
    parts: list[tuple[FloatArray, _Join]] = [(costs.total, np.add), (costs.waiting, np.add)]
    parts += [(part, np.maximum) for part in (costs.forward, costs.backward, costs.forward + costs.backward)]
    tables = [(c, join, _ahead(problem, states, c, join), _behind(problem, states, c, join)) for c, join in parts]
    least = np.full(len(problem.first), np.inf)
    for state, device, next_state in states.moves:
        arcs = states.arcs[device]
        first, end = problem.first[arcs], problem.end[arcs]
        total, waiting, forward, backward, both = (
            join(join(ahead[state, first], cost[arcs]), behind[next_state, end]) for cost, join, ahead, behind in tables
        )
        # The largest forward and the largest backward are of one stage or of two: both bounds hold for their sum.
        largest = np.maximum(forward + backward, both)
        through = total + _times(problem.micro_batches - 1, largest)
        if problem.micro_batches > 1:
            through = np.maximum(through, waiting + forward + _times(problem.micro_batches - 2, largest))
        least[arcs] = np.minimum(least[arcs], through)
    return least


def _times(count: int, times_us: FloatArray) -> FloatArray:
    # 0 times infinity is not a number.
    return count * times_us if count else np.zeros_like(times_us)


def _first_plan(problem: ArcProblem) -> Plan:
    """A good plan, or () if none was found: shortest paths over the arcs not much larger than a min-max path's."""
    costs, states = StepCosts.of(problem), _States.of(problem)
    plans = set()
    for forward, backward in ((1, 1), (3, 1), (1, 3), (1, 0), (0, 1)):
        size = forward * costs.forward + backward * costs.backward
        least = _behind(problem, states, size, np.maximum)[0, 0]
        for slack in (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5):
            allowed = size <= least * slack * (1 + _RELATIVE)
            plans.add(_shortest(problem, states, np.where(allowed, costs.waiting, np.inf)))
    good = [plan for plan in plans if plan and _enough_devices(problem, plan)]
    return min(good, key=lambda plan: (step_us(problem, plan), plan), default=())


def _shortest(problem: ArcProblem, states: _States, costs: FloatArray) -> Plan:
    behind = _behind(problem, states, costs, np.add)
    if np.isinf(behind[0, 0]):
        return ()
    plan: list[int] = []
    state = layer = 0
    while layer < problem.num_layers:
        after = np.full(len(states.arcs), -1)
        for move in states.moves:
            if move.state == state:
                after[move.device] = move.next_state
        arcs = np.flatnonzero((problem.first == layer) & (after[problem.device] >= 0))
        arc = int(arcs[np.argmin(costs[arcs] + behind[after[problem.device[arcs]], problem.end[arcs]])])
        plan.append(arc)
        state, layer = int(after[problem.device[arc]]), int(problem.end[arc])
    return tuple(plan)


def _enough_devices(problem: ArcProblem, plan: Plan) -> bool:
    used = np.bincount(problem.device[list(plan)], minlength=len(problem.counts))
    return bool((used <= problem.counts).all())
