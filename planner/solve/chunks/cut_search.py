"""A descent over the cuts of several chunks, with whole stages recomputed.

Moves are simulated with the recomputation there is; of the fastest, recomputation is chosen anew on the devices that
they change. Where something is recomputed, the choices of one device are moves, too.

Complexity: O(V K M) for each batch of moves. Effort is counted in actions, for every batch of partitions anew.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.solve.chunks.descent import BATCH, ROWS, Candidate, Descent
from planner.solve.chunks.fitting import Fitting
from planner.solve.progress import Progress
from planner.solve.space.arrays import BoolArray, IntArray
from planner.solve.space.partitions import Evaluator

_MOST_PICKED = 12
"""How many moves of a batch, the fastest, have their recomputation chosen."""

_FRUITLESS, _FRUITLESS_ALONE = 4, 12
"""Restarts in a row without a better plan, after which there are no more: bounded effort, or not."""

_FRUITLESS_FROM_BEST = 100
"""The same of the best plan of a question."""

_PROMISING, _PROMISING_ALONE = 1.05, 1.25
"""A partition is not begun with anew if it is slower than the best by more than this: bounded effort, or not."""


class CutSearch(Descent[Candidate]):
    """A search over cuts and recomputation for one number of devices."""

    def __init__(self, progress: Progress, evaluator: Evaluator) -> None:
        super().__init__(progress, evaluator)
        self._fitting = Fitting(evaluator)

    def search(self, starts: Sequence[IntArray], most_actions: int) -> None:
        """Searches from each of some cuts, shape (S+1,), and simulates so many actions at most."""
        is_bounded = self.progress.effort.is_bounded
        self.descend(
            (self._evaluate(cuts[None], self._fitting.fastest(1)) for cuts in starts),
            most_actions,
            fruitless=_FRUITLESS if is_bounded else _FRUITLESS_ALONE,
            promising=_PROMISING if is_bounded else _PROMISING_ALONE,
        )

    def search_from(self, cuts: IntArray, choices: IntArray, most_actions: int) -> None:
        """Searches from the best partition of a question; cuts of shape (S+1,), choices of shape (S,)."""
        is_open = np.full((1, self.evaluator.num_devices), False)
        self.descend([self._evaluate(cuts[None], choices[None], is_open)], most_actions, fruitless=_FRUITLESS_FROM_BEST)

    def pick_best(self, candidate: Candidate, cuts: IntArray) -> Candidate:
        """The best of those that are the fastest, or hold least, with the recomputation there is."""
        choices = np.repeat(candidate.choices[None], len(cuts), axis=0)
        if candidate.over_bytes == 0:
            step_us = self.progress.simulate(self.evaluator, cuts, choices)
            picked = np.argsort(step_us, kind="stable")[:_MOST_PICKED]
        else:
            self.progress.effort.spent += self.evaluator.num_actions
            picked = np.argsort(self.evaluator.over_bytes(cuts, choices).sum(axis=1), kind="stable")[:_MOST_PICKED]
        cuts, choices = cuts[picked], choices[picked]
        changed = (cuts[:, :-1] != candidate.cuts[:-1]) | (cuts[:, 1:] != candidate.cuts[1:])
        is_open = np.stack([changed[:, list(chunks)].any(axis=1) for chunks in self.evaluator.chunks], axis=1)
        return self._evaluate(cuts, choices, is_open)

    def other_recomputations(self, candidate: Candidate) -> Iterator[Candidate]:
        """Other recomputations of one device; none where nothing is recomputed."""
        choices = self._other_choices(candidate)
        for first in range(0, len(choices), ROWS):
            self.progress.deadline.check()
            some = choices[first : first + ROWS]
            yield self._evaluate(np.repeat(candidate.cuts[None], len(some), axis=0), some)
            if self.is_over:
                return

    def perturb(self, candidate: Candidate) -> Candidate:
        """The partition after a few moves at random, or with a few choices at random where the cuts are fixed."""
        cuts, choices = candidate.cuts, candidate.choices.copy()
        is_open = np.full((1, self.evaluator.num_devices), True)
        if len(self.moves):
            return self._evaluate(self.random_cuts(cuts)[None], choices[None], is_open)
        for _ in range(self.random.randint(2, 4)):
            device = self.random.randrange(self.evaluator.num_devices)
            choices[list(self.evaluator.chunks[device])] = self.random.choice(self._fitting.combinations.tolist())
            is_open[0, device] = False
        return self._evaluate(cuts[None], choices[None], is_open)

    def _evaluate(self, cuts: IntArray, choices: IntArray, is_open: BoolArray | None = None) -> Candidate:
        """The best of some partitions, recomputation chosen on open devices."""
        if is_open is None and len(cuts) == 1:
            is_open = np.full((1, self.evaluator.num_devices), True)
        if is_open is not None:
            choices = self._fitting.fit(cuts, choices, is_open)
        self.progress.effort.spent += self.evaluator.num_actions + BATCH
        over = self.evaluator.over_bytes(cuts, choices).sum(axis=1)
        if over.min() > 0:
            at = int(over.argmin())
            return Candidate(cuts=cuts[at], choices=choices[at], over_bytes=float(over[at]))
        step_us = self.progress.simulate_fitting(self.evaluator, cuts, choices, over <= 0)
        at = int(step_us.argmin())
        return Candidate(cuts=cuts[at], choices=choices[at], step_us=float(step_us[at]))

    def _other_choices(self, candidate: Candidate) -> IntArray:
        """Every other recomputation of one device, shape (N, S); none where nothing is recomputed."""
        allowed, combinations = self.evaluator.allowed, self._fitting.combinations
        if candidate.over_bytes == 0 and (candidate.choices == allowed[0]).all():
            return np.empty((0, self.evaluator.num_stages), dtype=np.int64)
        every = np.repeat(candidate.choices[None], len(combinations) * self.evaluator.num_devices, axis=0)
        for device, chunks in enumerate(self.evaluator.chunks):
            every[device * len(combinations) : (device + 1) * len(combinations), list(chunks)] = combinations
        other_recomputations: IntArray = every[(every != candidate.choices).any(axis=1)]
        return other_recomputations
