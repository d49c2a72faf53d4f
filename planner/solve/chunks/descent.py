"""Local search over cuts, with random restarts from the best partition.

A move shifts the cuts a..b by the same number of layers. Only the stage before cut a and the stage after cut b change
their number of layers. With a = b, one cut moves; with a < b, the stages between cut a and cut b move together.

    before the move    |  0  |  1  |  2  |  3  |
    a = 2, b = 3, +1   |  0  |  1    |  2  |3  |

Moves are tried in random order (with a fixed seed), batch by batch. The search makes the best move of a batch if it
improves the partition. If no move improves the partition, the search makes a few random moves and continues.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Generic, TypeVar

import numpy as np

from planner.core.cost.arrays import BoolArray, IntArray
from planner.solve.answer import SAME
from planner.solve.search_state import SearchState
from planner.solve.space.partitions import Evaluator

ROWS = 128
"""Default number of cut moves that a local search simulates together."""

BATCH = 400
"""Cost of one batch of moves in addition to their simulation, in simulated actions."""

_SINGLE_STEPS, _STEPS = (-4, -2, -1, 1, 2, 4), (-2, -1, 1, 2)

_ALL_LENGTHS = 8
"""Number of consecutive cuts up to which moves of every length exist: 1, 2, ..., 8. Longer moves shift 12, 18, 27, ...
cuts (factor 1.5), or all cuts between two stages of one device."""

_SHORT_SHARE = 2
"""Divisor of `most_actions` in `Descent.descend`: the quotient is the limit for all short descents together."""

_SHORT_BATCHES = 6
"""Short descents from all starts are made only if the budget allows this number of batches of moves per start."""

_PERTURBATIONS = 2, 8
"""Smallest and largest number of random moves before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCandidate:
    """Partition in a local search."""

    cuts: IntArray
    """Cuts from 0 to L, shape (stages + 1,)."""
    choices: IntArray
    """Recompute choice of each stage: an index into `CHOICES`, or the constant `LAYERS`; shape (stages,)."""
    excess_bytes: float = 0.0
    """Bytes by which devices exceed their memory limits, summed over devices; 0 if the partition fits."""
    step_us: float = inf
    """Step time; infinite if the partition does not fit."""

    @property
    def sort_key(self) -> tuple[float, float]:
        """Values to compare: bytes over the memory limits, then step time; smaller is better."""
        return self.excess_bytes, self.step_us

    def beats(self, other: "PartitionCandidate") -> bool:
        """Return True if this partition is better than `other`."""
        return self.sort_key < (other.excess_bytes, other.step_us * (1 - SAME))


CandidateT = TypeVar("CandidateT", bound=PartitionCandidate)


class Descent(ABC, Generic[CandidateT]):
    """Local search over cuts and recomputation for one number of devices. Subclasses choose the recomputation.

    Args:
        state: Best partition so far, and limits of the search.
        evaluator: Evaluator for this number of devices.
        rows: Number of moves to simulate together.
        seed: Seed of the random order of moves.
    """

    def __init__(self, state: SearchState, evaluator: Evaluator, *, rows: int = ROWS, seed: int = 0) -> None:
        self.state, self.evaluator, self._rows = state, evaluator, rows
        self.random = random.Random(seed)  # noqa: S311
        self.moves = cut_moves(evaluator.stages_by_device)[: None if evaluator.case.rules.balance is None else 0]
        self._ends = 0

    @abstractmethod
    def pick_best(self, candidate: CandidateT, moves: IntArray) -> CandidateT:
        """Return the best partition that results from one move of `candidate`.

        `moves` has the possible moves, as indices into `Descent.moves`.
        """

    @abstractmethod
    def other_recomputations(self, candidate: CandidateT) -> Iterator[CandidateT]:
        """Yield good partitions with the same cuts, but other recomputation."""

    @abstractmethod
    def perturb(self, candidate: CandidateT) -> CandidateT:
        """Return the candidate after a few random changes."""

    @property
    def is_over(self) -> bool:
        """Return True if the limit on simulated actions is reached."""
        return self.state.budget.spent >= self._ends or self.state.budget.left <= 0

    def descend(
        self, starts: Iterable[CandidateT], most_actions: int, *, most_restarts: int, promising_ratio: float = inf
    ) -> None:
        """Improve each start, then repeatedly restart: change the best result at random and improve it.

        Args:
            starts: Partitions to start from.
            most_actions: Limit on the number of actions (forwards and backwards) that are simulated.
            most_restarts: Largest number of restarts in a row without a better plan.
            promising_ratio: Limit on the best result's step time for restarts, as a multiple of
                `SearchState.upper_us`. If the best result exceeds the memory limits, the search restarts anyway.
        """
        begin, ordered = self.state.budget.spent, sorted(starts, key=lambda start: start.sort_key)
        batches = most_actions // (2 * self.evaluator.num_actions + BATCH)
        if self.state.budget.is_bounded and 2 < len(ordered) <= batches // _SHORT_BATCHES:
            # The budget may suffice for one descent only, so a short descent from each start shows the best one.
            short = []
            for start in ordered:
                self._ends = self.state.budget.spent + most_actions // (_SHORT_SHARE * len(ordered))
                short.append(self._downhill(start))
            ordered = sorted(short, key=lambda start: start.sort_key)
        self._ends = begin + most_actions
        best: CandidateT | None = None
        for start in ordered:
            candidate = self._downhill(start)
            best = candidate if best is None or candidate.beats(best) else best
            if self.is_over:
                break
        left = most_restarts
        while best is not None and left and not self.is_over:
            if best.excess_bytes == 0 and best.step_us > self.state.upper_us * promising_ratio:
                break
            candidate = self._downhill(self.perturb(best))
            left = most_restarts if candidate.beats(best) else left - 1
            best = candidate if not best.beats(candidate) else best

    def random_cuts(self, cuts: IntArray) -> IntArray:
        """Return the cuts after a few random moves."""
        for _ in range(self.random.randint(*_PERTURBATIONS)):
            other = cuts + self.moves[self.random.randrange(len(self.moves))]
            if self._is_legal(other[None])[0]:
                cuts = other
        return cuts

    def _downhill(self, candidate: CandidateT) -> CandidateT:
        while not self.is_over:
            better = next((n for n in self._neighbors(candidate) if n.beats(candidate)), None)
            if better is None:
                break
            candidate = better
        return candidate

    def _neighbors(self, candidate: CandidateT) -> Iterator[CandidateT]:
        order = list(range(len(self.moves)))
        self.random.shuffle(order)
        for first in range(0, len(order), self._rows):
            self.state.deadline.check()
            moves = np.array(order[first : first + self._rows])
            moves = moves[self._is_legal(candidate.cuts + self.moves[moves])]
            if len(moves):
                yield self.pick_best(candidate, moves)
            if self.is_over:
                return
        yield from self.other_recomputations(candidate)

    def _is_legal(self, cuts: IntArray) -> BoolArray:
        is_legal: BoolArray = (cuts[:, 1:] > cuts[:, :-1]).all(axis=1) & self.evaluator.case.rules.allows(cuts)
        return is_legal


def cut_moves(chunks: Sequence[Sequence[int]]) -> IntArray:
    """Return moves that shift one cut or consecutive cuts by 1 to 4 layers; shape (moves, stages + 1).

    A move is an array to add to the cuts. `chunks` has the stages of each device.
    """
    num_stages = sum(map(len, chunks))
    lengths, length = list(range(1, min(_ALL_LENGTHS, num_stages - 1) + 1)), _ALL_LENGTHS
    while (length := length * 3 // 2) < num_stages:
        lengths.append(length)
    blocks = [(first, length) for length in lengths for first in range(1, num_stages - length + 1)]
    # To move all cuts between two stages of a device moves layers from one to the other.
    on_device = [(a + 1, b - a) for stages in chunks for a, b in combinations(sorted(stages), 2)]
    blocks = list(dict.fromkeys([*blocks, *on_device]))
    every = [(block, step) for block in blocks for step in (_SINGLE_STEPS if block[1] == 1 else _STEPS)]
    added = np.zeros((len(every), num_stages + 1), dtype=np.int64)
    for row, ((first, length), step) in enumerate(every):
        added[row, first : first + length] = step
    return added
