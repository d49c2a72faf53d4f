"""Cuts of several chunks improved step by step: from several starts downhill, then from the best one anew.

A move shifts the cuts a..b together: between them stages keep their layers but for one at either end.

    cuts               |  0  |  1  |  2  |  3  |            a = b moves one cut, a < b a block of stages
    a = 2, b = 3, +1   |  0  |  1    |  2  |3  |

Moves are drawn in random order, the same every time, and simulated some at a time with the recomputation there is; of
the fastest of these recomputation is chosen anew on the devices that they change, and the best one taken if it beats
what there is. Where something is recomputed, the choices of one device are moves, too. Where no move helps, the search
goes on from the best partition after a few moves at random.

As long as nothing fits, better means fewer bytes over the caps, from then on faster.

Complexity: O(V K M) for each batch of moves. Effort is counted in actions, for every `_ROWS` partitions anew.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.solve.arrays import BoolArray, IntArray
from planner.solve.fitting import Fitting
from planner.solve.many import Many
from planner.solve.progress import Progress

_ROWS = 128
"""Moves that are simulated at once."""

_PICKED = 12
"""Of these, the fastest whose recomputation is chosen."""

_SINGLE_STEPS, _STEPS = (-4, -2, -1, 1, 2, 4), (-2, -1, 1, 2)

_ALL_LENGTHS = 8
"""Blocks of up to so many cuts are moved, and of every other length that is half as long again."""

_SAME = 1e-12
"""Times closer than this are equal."""

_FRUITLESS, _FRUITLESS_ALONE = 4, 12
"""Restarts in a row without a better plan, after which there are no more: bounded effort, or not."""

_PROMISING, _PROMISING_ALONE = 1.05, 1.25
"""A partition is not begun with anew if it is slower than the best by more than this: bounded effort, or not."""

_BATCH = 400
"""Actions that take as long as choosing a batch and its recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A partition: where the search stands."""

    cuts: IntArray
    choices: IntArray
    over_bytes: float
    step_us: float

    def beats(self, other: "_Place") -> bool:
        """Whether it is over by fewer bytes, or else faster."""
        return (self.over_bytes, self.step_us) < (other.over_bytes, other.step_us * (1 - _SAME))


class CutSearch:
    """A search over cuts and recomputation for one number of devices.

    Args:
        progress: Of the case.
        many: Its partitions on so many devices.
        most_actions: How many actions it may simulate.
    """

    def __init__(self, progress: Progress, many: Many, most_actions: int) -> None:
        self._progress, self._many = progress, many
        self._fitting = Fitting(many)
        self._ends = progress.effort.spent + most_actions
        # Nothing but the question decides what is drawn.
        self._random = random.Random(0)  # noqa: S311
        self._moves = moves(many.num_stages)[: None if many.case.rules.balance is None else 0]

    def search(self, starts: Sequence[IntArray]) -> bool:
        """Searches from each of some cuts, shape (S+1,); whether anything that fits was found."""
        best: _Place | None = None
        for cuts in starts:
            place = self._downhill(self._placed(cuts[None], self._fitting.fastest(1)))
            if best is None or place.beats(best):
                best = place
            if self._is_over:
                break
        if best is None:
            return False
        is_bounded = self._progress.effort.is_bounded
        promising = _PROMISING if is_bounded else _PROMISING_ALONE
        fruitless, most = 0, _FRUITLESS if is_bounded else _FRUITLESS_ALONE
        while fruitless < most and not self._is_over:
            if best.over_bytes == 0 and best.step_us > self._progress.upper_us * promising:
                break
            place = self._downhill(self._shaken(best))
            fruitless = 0 if place.beats(best) else fruitless + 1
            best = place if not best.beats(place) else best
        return best.over_bytes == 0

    @property
    def _is_over(self) -> bool:
        return self._progress.effort.spent >= self._ends or self._progress.effort.left <= 0

    def _downhill(self, place: _Place) -> _Place:
        """The nearest partition of which no neighbour is better."""
        while not self._is_over:
            better = next((n for n in self._neighbours(place) if n.beats(place)), None)
            if better is None:
                break
            place = better
        return place

    def _neighbours(self, place: _Place) -> Iterator[_Place]:
        """The best of each batch of moves, as long as the effort lasts."""
        order = list(range(len(self._moves)))
        self._random.shuffle(order)
        for first in range(0, len(order), _ROWS):
            self._progress.deadline.check()
            cuts: IntArray = place.cuts + self._moves[order[first : first + _ROWS]]
            cuts = cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]
            cuts = cuts[self._wanted(cuts)]
            if len(cuts):
                yield self._best_of(place, cuts)
            if self._is_over:
                return
        choices = self._other_choices(place)
        for first in range(0, len(choices), _ROWS):
            self._progress.deadline.check()
            some = choices[first : first + _ROWS]
            yield self._placed(np.repeat(place.cuts[None], len(some), axis=0), some)
            if self._is_over:
                return

    def _best_of(self, place: _Place, cuts: IntArray) -> _Place:
        choices = np.repeat(place.choices[None], len(cuts), axis=0)
        if place.over_bytes == 0:
            step_us = self._progress.simulated(self._many, cuts, choices)
            picked = np.argsort(step_us, kind="stable")[:_PICKED]
        else:
            self._progress.effort.spent += self._many.num_actions
            picked = np.argsort(self._many.over_bytes(cuts, choices).sum(axis=1), kind="stable")[:_PICKED]
        cuts, choices = cuts[picked], choices[picked]
        changed = (cuts[:, :-1] != place.cuts[:-1]) | (cuts[:, 1:] != place.cuts[1:])
        is_open = np.stack([changed[:, list(chunks)].any(axis=1) for chunks in self._many.chunks], axis=1)
        return self._placed(cuts, choices, is_open)

    def _placed(self, cuts: IntArray, choices: IntArray, is_open: BoolArray | None = None) -> _Place:
        """The best of some partitions, recomputation chosen on open devices."""
        if is_open is None and len(cuts) == 1:
            is_open = np.full((1, self._many.num_devices), True)
        if is_open is not None:
            choices = self._fitting.fitted(cuts, choices, is_open)
        self._progress.effort.spent += self._many.num_actions + _BATCH
        over = self._many.over_bytes(cuts, choices).sum(axis=1)
        if over.min() > 0:
            at = int(over.argmin())
            return _Place(cuts=cuts[at], choices=choices[at], over_bytes=float(over[at]), step_us=inf)
        step_us = self._progress.raced(self._many, cuts, choices, over <= 0)
        at = int(step_us.argmin())
        return _Place(cuts=cuts[at], choices=choices[at], over_bytes=0.0, step_us=float(step_us[at]))

    def _other_choices(self, place: _Place) -> IntArray:
        """Every other recomputation of one device, shape (N, S); none where nothing is recomputed."""
        allowed, ways = self._many.allowed, self._fitting.ways
        if place.over_bytes == 0 and (place.choices == allowed[0]).all():
            return np.empty((0, self._many.num_stages), dtype=np.int64)
        every = np.repeat(place.choices[None], len(ways) * self._many.num_devices, axis=0)
        for device, chunks in enumerate(self._many.chunks):
            every[device * len(ways) : (device + 1) * len(ways), list(chunks)] = ways
        others: IntArray = every[(every != place.choices).any(axis=1)]
        return others

    def _shaken(self, place: _Place) -> _Place:
        """The partition after a few moves at random, or with a few choices at random where the cuts are fixed."""
        cuts, choices = place.cuts, place.choices.copy()
        is_open = np.full((1, self._many.num_devices), True)
        for _ in range(self._random.randint(2, 4)):
            if len(self._moves):
                other = cuts + self._moves[self._random.randrange(len(self._moves))]
                if (np.diff(other) > 0).all() and self._wanted(other[None])[0]:
                    cuts = other
            else:
                device = self._random.randrange(self._many.num_devices)
                choices[list(self._many.chunks[device])] = self._random.choice(self._fitting.ways.tolist())
                is_open[0, device] = False
        return self._placed(cuts[None], choices[None], is_open)

    def _wanted(self, cuts: IntArray) -> BoolArray:
        return ~np.asarray(self._many.case.rules.forbids(cuts[:, :-1], cuts[:, 1:]).any(axis=1))


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
