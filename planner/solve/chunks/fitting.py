"""Recomputation for cuts of several chunks: on each device the choices that fit and of which none could be cheaper.

A device's memory depends on the choices of its own chunks alone, and more recomputation never makes a step shorter: the
clocks of a schedule only grow with its durations, and what devices wait for before their first action are forwards. So
for the fastest step only the minimal choices of each device matter: those that fit, while none that recomputes less
in some chunk and no more in any does.

    allowed: never 0, always 2;  V = 2      (0, 0)   (0, 2)   (2, 0)   (2, 2)
    fits?                                     no       yes      no       yes
    minimal                                            x

Complexity: O(N |choices|^V) partitions whose memory is counted.
"""

from functools import cached_property
from itertools import product

import numpy as np

from planner.solve.space.arrays import BoolArray, FloatArray, IntArray
from planner.solve.space.partitions import Evaluator

_MOST_COMBINATIONS = 81
"""Ways to choose for one device: with more, chunks are recomputed from the first one on."""


class Fitting:
    """The choices for cuts under the caps."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    @property
    def is_exhaustive(self) -> bool:
        """Whether all ways to choose are looked at."""
        return bool(len(self._evaluator.allowed) ** self._evaluator.case.chunks <= _MOST_COMBINATIONS)

    @cached_property
    def combinations(self) -> IntArray:
        """Choices for the chunks of one device, the fastest first; shape (ways, V)."""
        allowed, num_chunks = self._evaluator.allowed, self._evaluator.case.chunks
        if self.is_exhaustive:
            return np.array(list(product(allowed, repeat=num_chunks)))
        steps = range(num_chunks + 1)
        some = [[choice] * n + [allowed[0]] * (num_chunks - n) for choice in allowed[1:] for n in steps]
        return np.unique(np.array([[allowed[0]] * num_chunks, *some]), axis=0)

    def fastest(self, num_partitions: int) -> IntArray:
        """As little recomputation as is allowed, shape (N, S)."""
        return np.full((num_partitions, self._evaluator.num_stages), self._evaluator.allowed[0])

    def fit(self, cuts: IntArray, choices: IntArray, is_open: BoolArray) -> IntArray:
        """The least recomputation that fits, shape (N, S); what is over by least where none does.

        Args:
            cuts: Shape (N, S+1).
            choices: Of devices that are not open, shape (N, S).
            is_open: Whose choices may change, shape (N, K).
        """
        evaluator = self._evaluator
        fitted = np.where(self._for_stages(is_open), evaluator.allowed[0], choices)
        rows = np.flatnonzero((evaluator.over_bytes(cuts, fitted) > 0).any(axis=1))
        if not len(rows) or len(self.combinations) == 1:
            return fitted
        over = self.over_by_combination(cuts[rows])
        combinations = np.lexsort((self._recompute_us(cuts[rows]), over), axis=1)[:, 0]
        best = np.empty((len(rows), evaluator.num_stages), dtype=np.int64)
        for device, chunks in enumerate(evaluator.chunks):
            best[:, list(chunks)] = self.combinations[combinations[:, device]]
        fitted[rows] = np.where(self._for_stages(is_open[rows]), best, choices[rows])
        return fitted

    def minimal(self, over: FloatArray) -> list[IntArray]:
        """For each device the ways that fit and are minimal.

        Args:
            over: Of one partition, as `over_by_combination` gives it: shape (ways, K).
        """
        lower = (self.combinations[:, None] <= self.combinations[None]).all(axis=2) & ~np.eye(
            len(self.combinations), dtype=bool
        )
        found = []
        for device in range(self._evaluator.num_devices):
            fits = over[:, device] <= 0
            found.append(np.flatnonzero(fits & ~(lower & fits[:, None]).any(axis=0)))
        return found

    def over_by_combination(self, cuts: IntArray) -> FloatArray:
        """By how much devices are over their caps with each of `combinations`, shape (N, ways, K)."""
        return self._evaluator.over_by_combination(cuts, np.searchsorted(self._evaluator.allowed, self.combinations))

    def _recompute_us(self, cuts: IntArray) -> FloatArray:
        """What devices compute again with each of `combinations`, for a micro-batch and roughly; shape (N, ways, K)."""
        forward_us = np.diff(self._evaluator.case.sums.forward_us[cuts], axis=1)
        # Of two that recompute the same, the last micro-batch decides.
        weights = np.where(self.combinations > 0, 1 + self.combinations * 1e-3, 0.0)
        return np.stack([forward_us[:, list(chunks)] @ weights.T for chunks in self._evaluator.chunks], axis=2)

    def _for_stages(self, by_device: BoolArray) -> BoolArray:
        """What holds for devices, for each of their stages."""
        by_stage = np.empty((len(by_device), self._evaluator.num_stages), dtype=bool)
        for device, chunks in enumerate(self._evaluator.chunks):
            by_stage[:, list(chunks)] = by_device[:, device, None]
        return by_stage
