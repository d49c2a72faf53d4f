"""Cuts improved step by step: from several starts downhill, then from the best one anew.

A move shifts the cuts a..b together: between them stages keep their layers but for one at either end.

    cuts               |  0  |  1  |  2  |  3  |            a = b moves one cut, a < b a block of stages
    a = 2, b = 3, +1   |  0  |  1    |  2  |3  |

Moves are drawn in random order, the same every time, and looked at some at a time; the best of these is taken if it
beats what there is. Where no move helps, the search goes on from the best partition after a few moves at random.

As long as nothing fits, better means fewer bytes over the caps, from then on faster.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

import numpy as np

from planner.solve.progress import SAME, Progress
from planner.solve.space.arrays import IntArray
from planner.solve.space.partitions import Evaluator

ROWS = 128
"""Moves that are simulated at once."""

BATCH = 400
"""Actions that take as long as choosing a batch and its recomputation."""

_SINGLE_STEPS, _STEPS = (-4, -2, -1, 1, 2, 4), (-2, -1, 1, 2)

_ALL_LENGTHS = 8
"""Blocks of up to so many cuts are moved, and of every other length that is half as long again."""

_PERTURBATIONS = 2, 8
"""So many moves at random, from the one to the other, lead away from where a search stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A partition: where a search stands."""

    cuts: IntArray
    """Shape (S+1,)."""
    choices: IntArray
    """Indices into `CHOICES`, or `LAYERS`; shape (S,)."""
    over_bytes: float = 0.0
    step_us: float = inf

    @property
    def rank(self) -> tuple[float, float]:
        """By how much it is over, then what it takes."""
        return self.over_bytes, self.step_us

    def beats(self, other: "Candidate") -> bool:
        """Whether it is over by fewer bytes, or else faster."""
        return self.rank < (other.over_bytes, other.step_us * (1 - SAME))


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Descent(ABC, Generic[CandidateT]):
    """A search over cuts, and what to recompute in them, for one number of devices.

    Args:
        progress: Of the case.
        evaluator: Its partitions on so many devices.
    """

    def __init__(self, progress: Progress, evaluator: Evaluator) -> None:
        self.progress, self.evaluator = progress, evaluator
        # Nothing but the question decides what is drawn.
        self.random = random.Random(0)  # noqa: S311
        self.moves = moves(evaluator.num_stages)[: None if evaluator.case.rules.balance is None else 0]
        self._ends = 0

    @abstractmethod
    def pick_best(self, candidate: CandidateT, cuts: IntArray) -> CandidateT:
        """The best partition with some of `cuts`, each a move away from `candidate`; shape (N, S+1)."""

    @abstractmethod
    def other_recomputations(self, candidate: CandidateT) -> Iterator[CandidateT]:
        """The best of each batch of partitions with the same cuts that recompute otherwise."""

    @abstractmethod
    def perturb(self, candidate: CandidateT) -> CandidateT:
        """The partition after a few changes at random."""

    @property
    def is_over(self) -> bool:
        """Whether no effort is left."""
        return self.progress.effort.spent >= self._ends or self.progress.effort.left <= 0

    def descend(
        self, starts: Iterable[CandidateT], most_actions: int, *, fruitless: int, promising: float = inf
    ) -> None:
        """Goes downhill from each start, and then from the best place anew.

        Args:
            starts: Where to begin.
            most_actions: How many actions it may simulate.
            fruitless: Restarts in a row without a better plan, after which there are no more.
            promising: A candidate is not begun with anew if it is slower than the best plan by more than this.
        """
        self._ends = self.progress.effort.spent + most_actions
        best: CandidateT | None = None
        for start in starts:
            candidate = self._downhill(start)
            best = candidate if best is None or candidate.beats(best) else best
            if self.is_over:
                break
        left = fruitless
        while best is not None and left and not self.is_over:
            if best.over_bytes == 0 and best.step_us > self.progress.upper_us * promising:
                break
            candidate = self._downhill(self.perturb(best))
            left = fruitless if candidate.beats(best) else left - 1
            best = candidate if not best.beats(candidate) else best

    def random_cuts(self, cuts: IntArray) -> IntArray:
        """Cuts after a few moves at random, as far as these may be."""
        for _ in range(self.random.randint(*_PERTURBATIONS)):
            other = cuts + self.moves[self.random.randrange(len(self.moves))]
            if len(self._legal(other[None])):
                cuts = other
        return cuts

    def _downhill(self, candidate: CandidateT) -> CandidateT:
        """The nearest partition of which no neighbour is better."""
        while not self.is_over:
            better = next((n for n in self._neighbors(candidate) if n.beats(candidate)), None)
            if better is None:
                break
            candidate = better
        return candidate

    def _neighbors(self, candidate: CandidateT) -> Iterator[CandidateT]:
        """The best of each batch of moves, as long as the effort lasts."""
        order = list(range(len(self.moves)))
        self.random.shuffle(order)
        for first in range(0, len(order), ROWS):
            self.progress.deadline.check()
            cuts = self._legal(candidate.cuts + self.moves[order[first : first + ROWS]])
            if len(cuts):
                yield self.pick_best(candidate, cuts)
            if self.is_over:
                return
        yield from self.other_recomputations(candidate)

    def _legal(self, cuts: IntArray) -> IntArray:
        """The cuts without empty stages that keep the rules."""
        some = cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]
        return some[self.evaluator.case.rules.allows(some)]


def moves(num_stages: int) -> IntArray:
    """What is added to the cuts of S stages by moves of one cut and of blocks of cuts, shape (moves, S+1)."""
    lengths, length = list(range(1, min(_ALL_LENGTHS, num_stages - 1) + 1)), _ALL_LENGTHS
    while (length := length * 3 // 2) < num_stages:
        lengths.append(length)
    every = [
        (first, length, step)
        for length in lengths
        for first in range(1, num_stages - length + 1)
        for step in (_SINGLE_STEPS if length == 1 else _STEPS)
    ]
    added = np.zeros((len(every), num_stages + 1), dtype=np.int64)
    for row, (first, length, step) in enumerate(every):
        added[row, first : first + length] = step
    return added
