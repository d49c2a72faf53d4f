"""Exact search over the cuts of a chain for a given M: a label dynamic program with bounds.

Stages are laid from the last to the first, the order in which backward visits them. A partial plan that covers layers
i..L-1 is a label (`laws.py`), and of the labels of one first layer and stage count only those are kept that
no other dominates. Three things keep them few: a label whose bound (its own times, the layers in front, and the
smallest possible bottlenecks of the layers in front) does not beat the best complete plan is dropped; what lies below
those smallest bottlenecks, or below that of the whole chain, is raised to it before labels are compared, since it
cannot decide; and a stage that alone is slower than the best plan allows is not in the tables (`width_for`). The first
complete plan comes from the same search with only the most promising label kept of each first layer.

    level   labels, each drawn from its first layer on                  K = 3, L = 8
      0                            [ 7 ]    [ 6 7 ]    [ 5 6 7 ]        one stage
      1               [ 4 5 6 ][ 7 ]    [ 5 ][ 6 7 ]   …                one more in front of each label of level 0
      2     [ 0 1 2 3 ][ 4 5 6 ][ 7 ]   …                               those that begin at layer 0 are plans

Complexity: with windows of W layers, O(K L W) time for the bounds and O(K L W · labels) for the search, where W is
about L/K on long chains, and most first layers are out of reach from one side or the other; O(K L + L W) memory. Few
labels survive on real chains. Exact for any input: no candidate is dropped but by a bound or by dominance.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from planner.solve.chain.laws import Ahead, Law
from planner.solve.deadline import NEVER, Deadline
from planner.solve.space.arrays import BoolArray, ChoiceArray, FloatArray, IndexArray, IntArray
from planner.solve.space.prefixes import MOST_CANDIDATES, Prefixes
from planner.solve.space.problem import ChainProblem, Stages

RELATIVE = 1e-12
"""Sums in another order differ by rounding: a plan must be better by more than this to count as better."""

_SLACKS = (1.01, 1.05, 1.25)
"""A first plan is looked for within so much of the bound."""

_MORE_LABELS = 8
"""So many labels of each first layer are kept in a search before the exact one."""


class ChainCuts(NamedTuple):
    """A partition: stage k runs layers cuts[k]..cuts[k+1]-1 with the recomputation choices[k]."""

    step_us: float
    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    rank: tuple[float, ...]
    """What the law compared it by."""


class _Level(NamedTuple):
    """Labels with the same number of stages; the last dimension of every array is n, the labels."""

    first: IntArray
    parent: IntArray
    """Position of the label behind the foremost stage, one level up."""
    choice: ChoiceArray
    numbers: FloatArray
    """Shape (numbers of the law, n)."""
    bound: FloatArray
    rank: FloatArray
    """Below the rank of every completion, shape (numbers to rank by, n)."""

    def take(self, index: IndexArray) -> "_Level":
        fields: list[Any] = [field.take(index, axis=-1) for field in self]
        return _Level(*fields)


class _Wanted(NamedTuple):
    """What a label must come to, at best, to be kept."""

    upper_us: float
    best_rank: tuple[float, ...] | None = None


class LabelSearch:
    """The search over one problem under one law.

    Args:
        problem: The question.
        law: What labels are and how they grow.
        deadline: When `OutOfTimeError` is raised.
    """

    def __init__(self, problem: ChainProblem, law: Law, *, deadline: Deadline = NEVER) -> None:
        self.problem = problem
        self.law = law
        self.is_exhaustive = True
        """Whether the last run left out nothing for its number of labels."""
        self._deadline = deadline
        self._work = (problem.sums.forward_us + problem.sums.backward_us) / problem.fastest
        self._own_us = float(problem.sums.own_us(np.array([0]), np.array([1]), problem.fastest)[0])
        self.prefixes = Prefixes(problem, law.needs, deadline=deadline)
        self._least = self.prefixes.least

    def root_bound_us(self) -> float:
        """Below the step time of every partition; infinite if none fits."""
        empty = self._root()
        return float(self.law.bound_us(tuple(empty.numbers), self._ahead(empty.first, self.problem.num_stages))[0])

    def least_of_chain(self) -> dict[str, float]:
        """The least that all layers cost, by what the law needs."""
        return {name: float(tables[-1][self.problem.num_layers]) for name, tables in self._least.items()}

    def best(self, *, upper_us: float = np.inf) -> ChainCuts | None:
        """The partition with the smallest time under the law, or None if none is faster than `upper_us`."""
        root_us = self.root_bound_us()
        if not root_us < just_below(upper_us):
            return None
        # A first plan costs least where little is allowed; that there is none then tells nothing.
        for slack in _SLACKS:
            allowed_us = min(upper_us, root_us * slack)
            first = self.run(upper_us=allowed_us, most_labels=1) if root_us < just_below(allowed_us) else None
            if first is not None:
                return self._improved(first)
            if allowed_us == upper_us:
                break
        return self.run(upper_us=upper_us)

    def _improved(self, best: ChainCuts) -> ChainCuts:
        """The best partition, from a first one: few labels come first, since a better one rules out more others."""
        best = self.run(upper_us=best.step_us, most_labels=_MORE_LABELS) or best
        return self.run(upper_us=best.step_us) or best

    def run(
        self,
        *,
        upper_us: float,
        most_labels: int | None = None,
        best_rank: tuple[float, ...] | None = None,
        most_in_level: float = np.inf,
        enough_in_all: float = 0,
    ) -> ChainCuts | None:
        """The partition that ranks first under the law, of those faster than `upper_us`; None if there is none.

        Args:
            upper_us: Only partitions faster than this are looked for.
            most_labels: How many labels to keep of each first layer; the answer need not be the first then.
            best_rank: Only partitions that rank before this are looked for.
            most_in_level: With more labels of one stage count than this, the search ends with what it has.
            enough_in_all: It goes on nevertheless until it has so many of all stage counts.
        """
        levels = [self._root()]
        best: ChainCuts | None = None
        self.is_exhaustive = most_labels is None
        in_all = 0
        for level in range(self.problem.num_stages):
            labels = self._next_level(levels[-1], level, _Wanted(upper_us, best_rank))
            # To find the undominated ones of so many is what takes long: hopeless levels are not begun.
            is_hopeless = len(labels.first) > max(20 * most_in_level, enough_in_all)
            if not is_hopeless:
                levels.append(self._reduced(labels, most_labels))
                in_all += len(levels[-1].first)
            if is_hopeless or (len(levels[-1].first) > most_in_level and in_all > enough_in_all):
                self.is_exhaustive = False
                break
            rank, index = self._first_of_complete(levels[-1])
            if rank is not None and (best_rank is None or rank < best_rank):
                best_rank = rank
                best = ChainCuts(float(levels[-1].bound[index]), *self._trace(levels, level + 1, index), rank)
                # Where ranks tell plans of equal time apart, the time to beat stays what it was.
                if self.law.rank_is_time:
                    upper_us = best.step_us
        return best

    def all_below(self, upper_us: float, most: int) -> tuple[list[ChainCuts], bool]:
        """Every partition faster than `upper_us`, and whether they are all.

        Where more than `most` partial plans lead to them, the most promising are followed.
        """
        levels = [self._root()]
        partitions: list[ChainCuts] = []
        are_all = True
        for level in range(self.problem.num_stages):
            labels = self._next_level(levels[-1], level, _Wanted(upper_us))
            # Nothing is dropped for being dominated: that is so of bounds, and says nothing of simulated times.
            if len(labels.first) > most:
                labels, are_all = labels.take(np.argsort(labels.bound, kind="stable")[:most]), False
            levels.append(labels)
            partitions += [
                ChainCuts(float(labels.bound[n]), *self._trace(levels, level + 1, int(n)), ())
                for n in np.flatnonzero(labels.first == 0)
            ]
        return partitions, are_all

    def _first_of_complete(self, labels: "_Level") -> tuple[tuple[float, ...] | None, int]:
        # Labels ascend by first layer: complete ones come first.
        if not len(labels.first) or labels.first[0] > 0:
            return None, -1
        complete = int(np.searchsorted(labels.first, 1))
        index = int(np.lexsort(tuple(labels.rank[::-1, :complete]))[0])
        return tuple(labels.rank[:, index].tolist()), index

    # ---- bounds

    def _ahead(self, first: IntArray, stages_left: int) -> Ahead:
        return Ahead(
            work_us=self._work[first],
            own_us=self._own_us,
            some=first > 0,
            least={name: tables[stages_left][first] for name, tables in self._least.items()},
        )

    def _whole(self, ahead: Ahead) -> Ahead:
        """`ahead`, with largest stages that are not smaller than the smallest possible of the whole chain."""
        end = self.problem.num_layers
        largest = {
            name: np.maximum(least, self._least[name][-1][end])
            for name, least in ahead.least.items()
            if self.law.needs[name].join is np.maximum
        }
        return replace(ahead, least={**ahead.least, **largest})

    # ---- labels

    def _root(self) -> _Level:
        # A level of one empty label: no stage yet, all layers in front.
        nowhere, zero = np.array([-1]), np.zeros((1, 1))
        end = np.array([self.problem.num_layers])
        return _Level(end, nowhere, nowhere.astype(np.int8), np.zeros((self.law.size, 1)), zero[0], zero)

    def _next_level(self, labels: _Level, level: int, wanted: _Wanted) -> _Level:
        """All labels with one more stage in front that can still rank before the best."""
        parts = [self._extended(labels, block, level, wanted) for block in self._blocks(labels)]
        # No label has layers in front any more.
        if not parts:
            return labels.take(np.empty(0, dtype=np.intp))
        if len(parts) == 1:
            return parts[0]
        return _Level(*(np.concatenate(fields, axis=-1) for fields in zip(*parts, strict=True)))

    def _blocks(self, labels: _Level) -> Iterator[IndexArray]:
        # A label that begins at layer 0 is a plan, and nothing goes in front of it.
        open_ = np.flatnonzero(labels.first > 0)
        size = max(1, MOST_CANDIDATES // self.problem.width)
        for start in range(0, len(open_), size):
            self._deadline.check()
            yield open_[start : start + size]

    def _extended(self, labels: _Level, block: IndexArray, level: int, wanted: _Wanted) -> _Level:
        """The labels at `block` with each stage in front that a level may run, in each of its ways."""
        stages_left = self.problem.num_stages - level - 1
        stages, row = self._in_front(level, labels.first[block])
        # What no number of stages can reach from the front is not worth a look.
        some = np.isfinite(next(iter(self._least.values()))[stages_left])
        way, label, column = np.nonzero(np.isfinite(stages.forward[:, row]) & some[stages.first[:, row]])
        at, parent = stages.at(way, row[label], column), block[label]
        numbers = self.law.extend(tuple(labels.numbers.take(parent, axis=1)), at, level)
        ahead = self._ahead(at.first, stages_left)
        bound = self.law.bound_us(numbers, ahead)
        rank = np.stack(self.law.rank_bound(numbers, ahead, bound))
        is_kept = bound < just_below(wanted.upper_us)
        if wanted.best_rank is not None:
            is_kept &= _before(rank, wanted.best_rank)
        kept = np.flatnonzero(is_kept)
        first = at.first.take(kept)
        # Bounds are those of the label as it is; only what goes on is raised, so that more of it is dominated.
        whole = self._whole(self._ahead(first, stages_left))
        raised = np.stack(self.law.raised(tuple(number.take(kept) for number in numbers), whole))
        return _Level(first, parent.take(kept), at.choice.take(kept), raised, bound.take(kept), rank.take(kept, axis=1))

    def _in_front(self, level: int, first: IntArray) -> tuple[Stages, IntArray]:
        """The stages of a level, and in which of their rows those are that end where labels begin."""
        if self.prefixes.every is not None:
            return self.prefixes.every, first
        # Labels of one first layer are followed by the same stages: those are worked out once, in a row for each end.
        is_end = np.zeros(self.problem.num_layers + 1, dtype=bool)
        is_end[first] = True
        return self.prefixes.stages(level, np.flatnonzero(is_end)), (np.cumsum(is_end) - 1)[first]

    def _reduced(self, labels: _Level, most_labels: int | None) -> _Level:
        if len(labels.first) == 1:
            return labels
        # Where only a few are kept, those that can still be fast come first.
        keys = (*labels.rank, *labels.numbers) if most_labels is None else (labels.bound, *labels.rank)
        # In this order no label is dominated by one behind it, and one pass over the leaders is enough.
        labels = labels.take(np.lexsort((*keys[::-1], labels.first)))
        return labels.take(undominated(labels.first, labels.numbers, most_labels))

    def _trace(self, levels: list[_Level], level: int, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # From the foremost stage back to the empty label, whose first layer is L.
        cuts, choices = [], []
        while level >= 0:
            cuts.append(int(levels[level].first[index]))
            if level:
                choices.append(int(levels[level].choice[index]))
            index = int(levels[level].parent[index])
            level -= 1
        return tuple(cuts), tuple(choices)


def just_below(upper_us: float) -> float:
    """What a step time must be below to beat `upper_us`, rounding apart."""
    return upper_us * (1 - RELATIVE) if np.isfinite(upper_us) else upper_us


def _before(rank: FloatArray, best: tuple[float, ...]) -> BoolArray:
    # From the last number to the first: before by this one, or equal in it and before by the rest.
    before = np.zeros(rank[0].shape, dtype=bool)
    for number, of_best in zip(rank[::-1], best[::-1], strict=True):
        before = (number < of_best * (1 - RELATIVE)) | ((number <= of_best * (1 + RELATIVE)) & before)
    return before


def undominated(group: IntArray, numbers: FloatArray, most: int | None = None) -> IndexArray:
    """Indices of the rows that no other row of the same group dominates.

    Args:
        group: Shape (n,), ascending; rows of a group in an order in which none is dominated by a later one, equal
            ones apart.
        numbers: Shape (numbers, n), smaller is better.
        most: Only the first so many of each group.

    Complexity: O(n) per round, and as many rounds as the largest group has undominated rows.
    """
    left = np.arange(len(group))
    kept: list[IndexArray] = []
    while len(left) and (most is None or len(kept) < most):
        # The first row left of each group is dominated by none; it takes out those that it dominates.
        is_head = np.ones(len(left), dtype=bool)
        np.not_equal(group[1:], group[:-1], out=is_head[1:])
        kept.append(left[is_head])
        heads = numbers.take(np.flatnonzero(is_head), axis=1).take(np.cumsum(is_head) - 1, axis=1)
        stays = np.flatnonzero((heads > numbers * (1 + RELATIVE)).any(axis=0))
        # What is left is copied together: in many rounds, to look it up again and again would take longest.
        left, group, numbers = left[stays], group[stays], numbers.take(stays, axis=1)
    return np.sort(np.concatenate(kept)) if kept else left
