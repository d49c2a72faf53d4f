"""Exact search over the cuts of a chain for GPipe with a given M: a label dynamic programme with bounds.

The step time of a partition (`planner.core.step_time`) is

    T = sum F + sum C + (M-1) max(F, C)  +  D  +  U

where D is the makespan of the backward flow shop and U what the optimizers' steps add. Stages are laid from the last to
the first, the order in which backward visits them. A partial plan that covers layers i..L-1 is a label

    f   largest forward time of any stage or link so far
    x   largest backward time so far
    a   sum of forward and backward times so far
    d   the last micro-batch's path: d = max(d, a + (M-2) x) + q for each further stage (see `flow_shop_us`)

    u   what the optimizers' steps of these stages would add: u = max(U_k, u - (F + B + 2 C)) for a stage k in front

and only labels that no other label of the same first layer dominates in all five are kept. Two things keep them few: a
label whose bound (its own times, the layers left, and the smallest possible bottlenecks of the layers left) does not
beat the best complete plan is dropped; and f and x are raised to those smallest possible bottlenecks before labels are
compared, since nothing below them can decide. The first complete plans come from min-max partitions improved by moving
single cuts.

Complexity: O(K L^2) for the bounds, and O(K L^2 · labels) in all; few labels survive on real chains. Exact for any
input: no candidate is dropped but by a bound or by dominance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.solve.intervals import Intervals

__all__ = ["ChainProblem", "Found", "best_partition"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_RELATIVE = 1e-12
"""Sums in another order differ by rounding: a plan must be better by more than this to count as better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem:
    """Where to cut a chain of L layers into stages, for M micro-batches."""

    devices: tuple[Intervals, ...]
    """The intervals each device can run, in pipeline order; one object for all where devices are alike."""
    micro_batches: int
    link_us: FloatArray
    """Shape (L+1,): time on the link for a cut in front of layer i."""
    receive_us: FloatArray
    """Shape (L+1,): time that a stage behind such a cut is kept busy by receiving, part of its `Intervals`."""
    work_us: FloatArray
    """Shape (L+1,): forward + backward of layers 0..i-1 without recomputation: what every partition pays."""
    optimizer_us: FloatArray
    """Shape (L+1,): the optimizer's step over layers 0..i-1."""

    @property
    def alike(self) -> bool:
        """Whether all devices can run the same intervals."""
        return all(device is self.devices[0] for device in self.devices)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.link_us) - 1


class Found(NamedTuple):
    """A partition: stage k runs layers cuts[k]..cuts[k+1]-1 on device k."""

    step_us: float
    cuts: tuple[int, ...]


def best_partition(problem: ChainProblem, *, upper_us: float = np.inf) -> Found | None:
    """The fastest partition, or None if none is faster than `upper_us`."""
    best: Found | None = None
    # Devices that are alike are searched for all stage counts at once: a plan of K' stages is a label at level K'.
    counts = [len(problem.devices)] if problem.alike else range(len(problem.devices), 0, -1)
    for num_stages in counts:
        search = _Search(problem, num_stages)
        if not _beats(search.root_bound(), upper_us):
            continue
        first = search.incumbent()
        if first is not None and _beats(first.step_us, upper_us):
            best, upper_us = first, first.step_us
        best = search.run(upper_us) or best
        upper_us = best.step_us if best is not None else upper_us
    return best


class _Labels(NamedTuple):
    first: IntArray
    forward: FloatArray
    backward: FloatArray
    total: FloatArray
    done: FloatArray
    tail: FloatArray
    parent: IntArray

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "_Labels":
        return _Labels(
            self.first[index],
            self.forward[index],
            self.backward[index],
            self.total[index],
            self.done[index],
            self.tail[index],
            self.parent[index],
        )


class _Search:
    """One search: with devices alike for at most `num_stages` stages, else for exactly so many."""

    def __init__(self, problem: ChainProblem, num_stages: int) -> None:
        self.problem = problem
        self.num_stages = num_stages
        self.extra = problem.micro_batches - 1
        self.num_layers = problem.num_layers
        self.least_forward = self._bottlenecks([d.forward for d in problem.devices])
        self.least_backward = self._bottlenecks([d.backward for d in problem.devices])

    def _bottlenecks(self, times: Sequence[FloatArray]) -> list[FloatArray]:
        """Smallest possible largest stage of layers 0..i-1 in r stages (at most r if alike), at [r][i]."""
        best = [np.where(np.arange(times[0].shape[0]) == 0, 0.0, np.inf)]
        for stage in range(self.num_stages):
            longer = np.min(np.maximum(best[-1][:, None], times[stage]), axis=0, initial=np.inf)
            best.append(np.minimum(longer, best[-1]) if self.problem.alike else longer)
        return best

    def root_bound(self) -> float:
        """Bound on the step time of any partition."""
        end = self.num_layers
        forward, backward = self.least_forward[-1][end], self.least_backward[-1][end]
        bottlenecks = float(_times(self.extra, forward + backward))
        return bottlenecks + float(self.problem.work_us[end] + self.problem.optimizer_us[1])

    # ---- a first plan

    def incumbent(self) -> Found | None:
        """A good plan: min-max partitions of weighted stage times, improved by moving single cuts."""
        plans = {cuts for forward, backward in ((1, 1), (3, 1), (1, 3)) for cuts in self._min_max(forward, backward)}
        found = [Found(self.step_us(cuts), cuts) for cuts in sorted(plans)]
        found = sorted(plan for plan in found if np.isfinite(plan.step_us))
        return min((self._improve(plan) for plan in found[:3]), default=None)

    def _min_max(self, forward: float, backward: float) -> Iterator[tuple[int, ...]]:
        times = [forward * d.forward + backward * d.backward for d in self.problem.devices]
        best = np.where(np.arange(self.num_layers + 1) == 0, 0.0, np.inf)
        sources: list[IntArray] = []
        for stage in range(self.num_stages):
            through = np.maximum(best[:, None], times[stage])
            sources.append(np.argmin(through, axis=0))
            best = through[sources[-1], np.arange(self.num_layers + 1)]
            if np.isfinite(best[-1]) and (self.problem.alike or stage == self.num_stages - 1):
                yield self._trace(sources)

    def _trace(self, sources: list[IntArray]) -> tuple[int, ...]:
        cuts = [self.num_layers]
        for source in reversed(sources):
            cuts.append(int(source[cuts[-1]]))
        return tuple(reversed(cuts))

    def _improve(self, plan: Found) -> Found:
        while True:
            moves = [
                (*plan.cuts[:k], plan.cuts[k] + step, *plan.cuts[k + 1 :])
                for k in range(1, len(plan.cuts) - 1)
                for step in (-1, 1)
                if plan.cuts[k - 1] < plan.cuts[k] + step < plan.cuts[k + 1]
            ]
            better = min((Found(self.step_us(cuts), cuts) for cuts in moves), default=plan)
            if not _beats(better.step_us, plan.step_us):
                return plan
            plan = better

    def step_us(self, cuts: tuple[int, ...]) -> float:
        """Step time of a partition; infinite if a stage fits nowhere."""
        labels = self._root()
        stages = list(enumerate(pairwise(cuts)))
        for stage, (first, _) in reversed(stages):
            labels = self._extend(labels, np.zeros(1, dtype=np.int64), np.array([first]), self._table(stage))
        return float(self._step_us(labels)[0])

    # ---- the search

    def run(self, upper_us: float) -> Found | None:
        """The best partition, if it beats `upper_us`; None otherwise."""
        levels: list[_Labels] = [self._root()]
        best: tuple[float, int, int] | None = None
        for level in range(self.num_stages):
            labels = self._next_level(levels[-1], self.num_stages - level, upper_us)
            complete = np.flatnonzero(labels.first == 0)
            may_end = self.problem.alike or level == self.num_stages - 1
            if may_end and len(complete):
                times = self._step_us(labels)[complete]
                n = int(np.argmin(times))
                if _beats(times[n], upper_us):
                    upper_us = float(times[n])
                    best = (upper_us, level + 1, int(complete[n]))
            levels.append(labels)
        return None if best is None else Found(best[0], self._cuts(levels, best[1], best[2]))

    def _root(self) -> _Labels:
        zero = np.zeros(1)
        return _Labels(np.array([self.num_layers]), zero, zero, zero, zero, zero, np.array([-1]))

    def _next_level(self, labels: _Labels, stages_left: int, upper_us: float) -> _Labels:
        """All labels with one more stage in front that can still beat `upper_us`, dominated ones dropped."""
        open_ = np.flatnonzero(labels.first > 0)
        if not len(open_):
            return labels.take(open_)
        # Every open label times every first layer of the new stage.
        ends = labels.first[open_]
        parent = np.repeat(open_, ends)
        offsets = np.cumsum(ends) - ends
        first = np.arange(len(parent)) - np.repeat(offsets, ends)
        stage = stages_left - 1
        table = self._table(stage if not self.problem.alike else 0)
        fits = np.isfinite(table.forward[first, labels.first[parent]])
        new = self._extend(labels, parent[fits], first[fits], table)
        # `stages_left - 1` stages are left for the layers in front; without any, only complete labels live.
        forward = np.maximum(new.forward, self.least_forward[stage][new.first])
        least_backward = self.least_backward[stage][new.first]
        backward = np.maximum(new.backward, least_backward)
        done = np.maximum(new.done, new.total + _times(self.extra, least_backward)) + self.problem.work_us[new.first]
        tail = np.where(new.first > 0, self.problem.optimizer_us[1], new.tail)
        bound = done + _times(self.extra, forward) + tail
        new = new._replace(forward=forward, backward=backward).take(bound < _just_below(upper_us))
        return new.take(_undominated(new))

    def _extend(self, labels: _Labels, parent: IntArray, first: IntArray, table: Intervals) -> _Labels:
        """Labels `parent` with the stage `first`..(their first layer) in front, and the link between."""
        end = labels.first[parent]
        link = np.where(end < self.num_layers, self.problem.link_us[end], 0.0)
        forward, backward = table.forward[first, end], table.backward[first, end]
        last_backward = table.last_backward[first, end]
        total, most, done = labels.total[parent], labels.backward[parent], labels.done[parent]
        # Both flow shops are summed up in one: a machine's forward time is simply waited for.
        for ahead, p, q in ((link, link, link), (forward, backward, last_backward)):
            total, most = total + ahead + p, np.maximum(most, p)
            follow = total + _times(self.extra - 1, most) if self.extra > 0 else 0.0
            done = np.maximum(done + ahead, follow) + q
        largest = np.maximum(np.maximum(labels.forward[parent], link), forward)
        receive, optimizer = self.problem.receive_us, self.problem.optimizer_us
        hidden = forward + last_backward + 2 * link + receive[end] - receive[first]
        tail = np.maximum(optimizer[end] - optimizer[first], labels.tail[parent] - hidden)
        return _Labels(first, largest, most, total, done, tail, parent)

    def _step_us(self, labels: _Labels) -> FloatArray:
        times: FloatArray = labels.done + _times(self.extra, labels.forward) + labels.tail
        return times

    def _table(self, stage: int) -> Intervals:
        return self.problem.devices[stage]

    def _cuts(self, levels: list[_Labels], level: int, index: int) -> tuple[int, ...]:
        cuts = []
        while level >= 0:
            cuts.append(int(levels[level].first[index]))
            index = int(levels[level].parent[index])
            level -= 1
        return tuple(cuts)


def _undominated(labels: _Labels) -> IntArray:
    """Indices of the labels that no other label with the same first layer dominates."""
    costs = np.stack([labels.forward, labels.backward, labels.total, labels.done, labels.tail], axis=1)
    order = np.lexsort((*costs.T[::-1], labels.first))
    starts = np.flatnonzero(np.diff(labels.first[order], prepend=-1))
    groups = np.split(order, starts[1:]) if len(order) else [order]
    return np.concatenate([_pareto(costs, group) for group in groups])


def _pareto(costs: FloatArray, group: IntArray) -> IntArray:
    # `group` is sorted by the costs, so a row can only be dominated by one before it.
    if len(group) <= 1:
        return group
    kept: list[int] = []
    front = np.empty((len(group), costs.shape[1]))
    for index in group:
        row = costs[index]
        if not (front[: len(kept)] <= row * (1 + _RELATIVE)).all(axis=1).any():
            front[len(kept)] = row
            kept.append(int(index))
    return np.array(kept)


def _times(count: int, time: FloatArray) -> FloatArray:
    # 0 times infinity is not a number, but "fits nowhere" stays so however often it is done.
    return np.where(np.isinf(time), time, count * np.where(np.isinf(time), 0.0, time))


def _just_below(upper_us: float) -> float:
    return upper_us * (1 - _RELATIVE) if np.isfinite(upper_us) else upper_us


def _beats(step_us: float, upper_us: float) -> bool:
    return bool(step_us < _just_below(upper_us))
