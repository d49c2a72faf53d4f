"""Local search over cuts with several stages per device, where a stage is recomputed whole or not at all.

All moves of cuts are first simulated with the current recomputation. For the fastest moves, the recomputation of
devices whose stages change is then chosen again. Moves may also change the recomputation of one device.

Complexity: O(V K M) numpy operations for each batch of moves, with V chunks on each of K devices and M micro-batches.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.solve.answer import SAME
from planner.solve.chunks.descent import BATCH, ROWS, Descent, PartitionCandidate
from planner.solve.chunks.fitting import RecomputeFitter
from planner.solve.search_state import SearchState
from planner.solve.space.partitions import Evaluator

_MOST_PICKED = 12
"""Number of fastest moves of a batch whose recomputation is chosen again."""

_FRUITLESS = 12
"""Number of restarts in a row without a better plan, after which `CutSearch.search` ends."""

_FRUITLESS_FROM_BEST = 30
"""Number of restarts in a row without a better plan, after which `CutSearch.search_from` ends."""

_PROMISING_LIMITED, _PROMISING_UNLIMITED = 1.05, 1.25
"""Largest step time of the best result with which a search restarts, as a multiple of `SearchState.upper_us`: with a
limited and with an unlimited budget."""


class CutSearch(Descent[PartitionCandidate]):
    """Local search over cuts and the recomputation of whole stages, for one number of devices."""

    def __init__(self, state: SearchState, evaluator: Evaluator, *, rows: int = ROWS, seed: int = 0) -> None:
        super().__init__(state, evaluator, rows=rows, seed=seed)
        self._fitting = RecomputeFitter(evaluator)

    def search(self, starts: Sequence[IntArray], most_actions: int) -> None:
        """Search from several partitions, simulating at most `most_actions` actions; store the best plan in `state`.

        `starts` has the cuts of each partition, shape (stages + 1,).
        """
        is_bounded = self.state.budget.is_bounded
        self.descend(
            (self._evaluate(cuts[None], self._fitting.least_recomputation(1)) for cuts in starts),
            most_actions,
            most_restarts=_FRUITLESS,
            promising_ratio=_PROMISING_LIMITED if is_bounded else _PROMISING_UNLIMITED,
        )

    def search_from(self, cuts: IntArray, choices: IntArray, most_actions: int) -> None:
        """Search from one partition, simulating at most `most_actions` actions; store the best plan in `state`.

        Args:
            cuts: Cuts of the partition, shape (stages + 1,).
            choices: Index into `CHOICES` for each stage, shape (stages,).
            most_actions: Limit on simulated actions.
        """
        is_open = np.full((1, self.evaluator.num_devices), False)
        self.descend(
            [self._evaluate(cuts[None], choices[None], is_open)], most_actions, most_restarts=_FRUITLESS_FROM_BEST
        )

    def pick_best(self, candidate: PartitionCandidate, moves: IntArray) -> PartitionCandidate:
        cuts = candidate.cuts + self.moves[moves]
        choices = np.repeat(candidate.choices[None], len(cuts), axis=0)
        step_us: FloatArray | None = None
        if candidate.excess_bytes == 0:
            step_us = self._step_us_after_moves(candidate, moves, cuts, choices)
            picked = np.argsort(step_us, kind="stable")[:_MOST_PICKED]
        else:
            self.state.budget.spent += self.evaluator.num_actions
            picked = np.argsort(self.evaluator.excess_bytes(cuts, choices).sum(axis=1), kind="stable")[:_MOST_PICKED]
        cuts, choices = cuts[picked], choices[picked]
        changed = (cuts[:, :-1] != candidate.cuts[:-1]) | (cuts[:, 1:] != candidate.cuts[1:])
        is_open = changed[:, self.evaluator.stages].any(axis=2)
        if step_us is None:
            return self._evaluate(cuts, choices, is_open)
        # More recomputation never makes a step faster, so a slower move needs a device with less recomputation.
        has_less = (is_open & (candidate.choices != self.evaluator.allowed[0])[self.evaluator.stages].any(axis=1)).any(
            axis=1
        )
        some = has_less | (step_us[picked] < candidate.step_us * (1 - SAME))
        if not some.any():
            self.state.budget.spent += self.evaluator.num_actions + BATCH
            return candidate
        return self._evaluate(cuts[some], choices[some], is_open[some], step_us[picked[some]])

    def _step_us_after_moves(
        self, candidate: PartitionCandidate, moves: IntArray, cuts: IntArray, choices: IntArray
    ) -> FloatArray:
        # Restarts, and other searches of a case, often reach the same partition again.
        self.state.budget.count(self.evaluator, len(moves))
        key = candidate.cuts.tobytes() + candidate.choices.tobytes()
        known_us = self.evaluator.case.moved_us.setdefault(key, np.full(len(self.moves), np.nan))
        is_new = np.isnan(known_us[moves])
        if is_new.any():
            known_us[moves[is_new]] = self.evaluator.step_us(cuts[is_new], choices[is_new])
        step_us: FloatArray = known_us[moves]
        return step_us

    def other_recomputations(self, candidate: PartitionCandidate) -> Iterator[PartitionCandidate]:
        # A change of the choices of one device is a move. Yield the best of each batch of these moves.
        choices = self._other_choices(candidate)
        for first in range(0, len(choices), ROWS):
            self.state.deadline.check()
            some = choices[first : first + ROWS]
            yield self._evaluate(np.repeat(candidate.cuts[None], len(some), axis=0), some)
            if self.is_over:
                return

    def perturb(self, candidate: PartitionCandidate) -> PartitionCandidate:
        # If the cuts are fixed, recompute choices change at random.
        cuts, choices = candidate.cuts, candidate.choices.copy()
        is_open = np.full((1, self.evaluator.num_devices), True)
        if len(self.moves):
            return self._evaluate(self.random_cuts(cuts)[None], choices[None], is_open)
        for _ in range(self.random.randint(2, 4)):
            device = self.random.randrange(self.evaluator.num_devices)
            stages = list(self.evaluator.stages_by_device[device])
            choices[stages] = self.random.choice(self._fitting.combinations.tolist())
            is_open[0, device] = False
        return self._evaluate(cuts[None], choices[None], is_open)

    def _evaluate(
        self,
        cuts: IntArray,
        choices: IntArray,
        is_open: BoolArray | None = None,
        known_us: FloatArray | None = None,
    ) -> PartitionCandidate:
        # Return the best of several partitions. `is_open`, shape (partitions, devices), is true for devices whose
        # recomputation is chosen again. None: all devices if there is one partition, else no device. `known_us` has the
        # step time of each partition with `choices`, if they were simulated.
        if is_open is None and len(cuts) == 1:
            is_open = np.full((1, self.evaluator.num_devices), True)
        if is_open is None:
            excess_bytes = self.evaluator.excess_bytes(cuts, choices)
        else:
            fitted, excess_bytes = self._fitting.fit(cuts, choices, is_open)
            known_us = None if known_us is None else np.where((fitted == choices).all(axis=1), known_us, np.nan)
            choices = fitted
        self.state.budget.spent += self.evaluator.num_actions + BATCH
        over = excess_bytes.sum(axis=1)
        if over.min() > 0:
            at = int(over.argmin())
            return PartitionCandidate(cuts=cuts[at], choices=choices[at], excess_bytes=float(over[at]))
        step_us = self.state.simulate_fitting(self.evaluator, cuts, choices, over <= 0, known_us=known_us)
        at = int(step_us.argmin())
        return PartitionCandidate(cuts=cuts[at], choices=choices[at], step_us=float(step_us[at]))

    def _other_choices(self, candidate: PartitionCandidate) -> IntArray:
        allowed, combinations = self.evaluator.allowed, self._fitting.combinations
        if candidate.excess_bytes == 0 and (candidate.choices == allowed[0]).all():
            return np.empty((0, self.evaluator.num_stages), dtype=np.int64)
        every = np.repeat(candidate.choices[None], len(combinations) * self.evaluator.num_devices, axis=0)
        for device, chunks in enumerate(self.evaluator.stages_by_device):
            every[device * len(combinations) : (device + 1) * len(combinations), list(chunks)] = combinations
        is_other = np.any(every != candidate.choices, axis=1)
        if candidate.excess_bytes == 0:
            devices = np.arange(self.evaluator.num_devices)
            over = self._fitting.excess_bytes_by_choices(np.repeat(candidate.cuts[None], len(devices), axis=0), devices)
            # More recomputation never makes a step faster.
            is_other = (over.ravel() <= 0) & np.any(every < candidate.choices, axis=1)
        other_recomputations: IntArray = every[is_other]
        return other_recomputations
