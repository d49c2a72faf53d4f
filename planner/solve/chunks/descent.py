"""Descent over cuts: downhill from several starts, then repeatedly from the best result after random moves.

A move shifts the cuts a..b together by the same number of layers. Only the stages before a and after b change size.

    cuts               |  0  |  1  |  2  |  3  |            a = b moves one cut, a < b a block of stages
    a = 2, b = 3, +1   |  0  |  1    |  2  |3  |

Moves are tried in random order (with a fixed seed), batch by batch. The best move of a batch is made if it is an
improvement. If no move improves the partition, the search continues from the best partition after a few random moves.

Fewer bytes over the memory limits are better; among partitions that fit, the faster one is better.
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
"""Number of moves in a batch."""

BATCH = 400
"""Cost of choosing a batch of moves and their recomputation, in simulated actions."""

_SINGLE_STEPS, _STEPS = (-4, -2, -1, 1, 2, 4), (-2, -1, 1, 2)

_ALL_LENGTHS = 8
"""Longest block of which every length is moved; of longer ones, each length is 1.5 times the previous one."""

_PERTURBATIONS = 2, 8
"""Least and most random moves before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Partition in a descent."""

    cuts: IntArray
    """Shape (S+1,)."""
    choices: IntArray
    """Indices into `CHOICES`, or `LAYERS`; shape (S,)."""
    over_bytes: float = 0.0
    step_us: float = inf

    @property
    def rank(self) -> tuple[float, float]:
        """Key of comparison: bytes over the memory limits, then step time."""
        return self.over_bytes, self.step_us

    def beats(self, other: "Candidate") -> bool:
        """Return True if fewer bytes are over the limits, or as many and the step is faster."""
        return self.rank < (other.over_bytes, other.step_us * (1 - SAME))


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Descent(ABC, Generic[CandidateT]):
    """Search over cuts and recomputation for one number of devices.

    Args:
        progress: State of the search over the case.
        evaluator: Evaluator for this number of devices.
    """

    def __init__(self, progress: Progress, evaluator: Evaluator) -> None:
        self.progress, self.evaluator = progress, evaluator
        # A fixed seed: the same request always gets the same plan.
        self.random = random.Random(0)  # noqa: S311
        self.moves = moves(evaluator.num_stages)[: None if evaluator.case.rules.balance is None else 0]
        self._ends = 0

    @abstractmethod
    def pick_best(self, candidate: CandidateT, cuts: IntArray) -> CandidateT:
        """Return the best partition with one of `cuts`, shape (N, S+1), each one move away from `candidate`."""

    @abstractmethod
    def other_recomputations(self, candidate: CandidateT) -> Iterator[CandidateT]:
        """Yield the best of each batch of partitions with the same cuts and other recomputation."""

    @abstractmethod
    def perturb(self, candidate: CandidateT) -> CandidateT:
        """Return the partition after a few random changes."""

    @property
    def is_over(self) -> bool:
        """Return True if no effort is left."""
        return self.progress.effort.spent >= self._ends or self.progress.effort.left <= 0

    def descend(
        self, starts: Iterable[CandidateT], most_actions: int, *, fruitless: int, promising: float = inf
    ) -> None:
        """Go downhill from each start, then repeatedly from the best result after random moves.

        Args:
            starts: Partitions to start from.
            most_actions: Limit on simulated actions.
            fruitless: Restarts in a row without a better plan after which the search ends.
            promising: Largest ratio of the result to the best step time for a restart.
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
        """Return the cuts after a few random moves; moves that are not allowed are skipped."""
        for _ in range(self.random.randint(*_PERTURBATIONS)):
            other = cuts + self.moves[self.random.randrange(len(self.moves))]
            if len(self._legal(other[None])):
                cuts = other
        return cuts

    def _downhill(self, candidate: CandidateT) -> CandidateT:
        """Move to better neighbors until there is none; return the result."""
        while not self.is_over:
            better = next((n for n in self._neighbors(candidate) if n.beats(candidate)), None)
            if better is None:
                break
            candidate = better
        return candidate

    def _neighbors(self, candidate: CandidateT) -> Iterator[CandidateT]:
        """Yield the best of each batch of moves, until no effort is left."""
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
        """Return those of `cuts` that have no empty stage and keep the rules."""
        some = cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]
        return some[self.evaluator.case.rules.allows(some)]


def moves(num_stages: int) -> IntArray:
    """Return what each move of one cut, or of a block of cuts, adds to the cuts; shape (moves, S+1)."""
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
