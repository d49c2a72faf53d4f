"""Choice of recomputation for given cuts, with several chunks per device.

The memory of a device depends on the choices of its own chunks only. A step lasts from a device's first action to its
last one. More recomputation never makes a step faster: no action ends earlier, and first actions begin at the same
time, because they wait for forwards only. A combination of choices for the chunks of one device is minimal if it fits,
but would not fit if one or more chunks recomputed less. A fastest plan therefore uses a minimal combination on each
device.

    V = 2 chunks, never (0) or always (2)     (0, 0)   (0, 2)   (2, 0)   (2, 2)
    fits?                                       no       yes      no       yes
    minimal?                                    no       yes      no       no

Complexity: the memory of O(N C^V) partitions is computed, for N partitions, C choices and V chunks per device.
"""

from functools import cached_property
from itertools import product

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.solve.space.partitions import Evaluator

_MOST_COMBINATIONS = 81
"""Largest number of combinations per device that are all tried; if there are more, only first chunks are recomputed."""


class RecomputeFitter:
    """Search for the least recomputation with which given partitions fit into memory."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    @property
    def is_exhaustive(self) -> bool:
        """Return True if `combinations` contains every combination of the allowed choices."""
        return bool(len(self._evaluator.allowed) ** self._evaluator.case.chunks <= _MOST_COMBINATIONS)

    @cached_property
    def combinations(self) -> IntArray:
        """Recompute choices for the stages of a device, in lexicographic order; shape (combinations, chunks)."""
        allowed, num_chunks = self._evaluator.allowed, self._evaluator.case.chunks
        if self.is_exhaustive:
            return np.array(list(product(allowed, repeat=num_chunks)))
        steps = range(num_chunks + 1)
        some = [[choice] * n + [allowed[0]] * (num_chunks - n) for choice in allowed[1:] for n in steps]
        return np.unique(np.array([[allowed[0]] * num_chunks, *some]), axis=0)

    def least_recomputation(self, num_partitions: int) -> IntArray:
        """Return the recompute choices with the least recomputation allowed; shape (num_partitions, stages)."""
        return np.full((num_partitions, self._evaluator.num_stages), self._evaluator.allowed[0])

    def fit(self, cuts: IntArray, choices: IntArray, is_open: BoolArray) -> IntArray:
        """Return recompute choices that fit into memory with the least recomputation time.

        If no choices fit, return choices that exceed the memory limits least.

        Args:
            cuts: Cuts of each partition, shape (partitions, stages + 1).
            choices: Choices to keep on devices that are not open, shape (partitions, stages).
            is_open: True for devices whose choices may change, shape (partitions, devices).

        Returns:
            Choices, shape (partitions, stages).
        """
        evaluator = self._evaluator
        fitted = np.where(is_open[:, evaluator.device_of_stage], evaluator.allowed[0], choices)
        rows = np.flatnonzero((evaluator.excess_bytes(cuts, fitted) > 0).any(axis=1))
        if not len(rows) or len(self.combinations) == 1:
            return fitted
        over = self.excess_by_combination(cuts[rows])
        combinations = np.lexsort((self._recompute_us(cuts[rows]), over), axis=1)[:, 0]
        best = np.empty((len(rows), evaluator.num_stages), dtype=np.int64)
        best[:, evaluator.stages] = self.combinations[combinations]
        fitted[rows] = np.where(is_open[rows][:, evaluator.device_of_stage], best, choices[rows])
        return fitted

    def minimal_combinations(self, over: FloatArray) -> list[IntArray]:
        """Return the indices of the minimal combinations of recompute choices for each device.

        A combination is minimal if it fits, but would not fit if one or more stages recomputed less. `over` has the
        bytes by which each device exceeds its memory limit with each combination; shape (combinations, devices).
        """
        lower = (self.combinations[:, None] <= self.combinations[None]).all(axis=2) & ~np.eye(
            len(self.combinations), dtype=bool
        )
        found = []
        for device in range(self._evaluator.num_devices):
            fits = over[:, device] <= 0
            found.append(np.flatnonzero(fits & ~(lower & fits[:, None]).any(axis=0)))
        return found

    def excess_by_combination(self, cuts: IntArray) -> FloatArray:
        """Return the bytes by which each device exceeds its memory limit, for each combination of recompute choices.

        `cuts` has the shape (partitions, stages + 1), the result (partitions, combinations, devices).
        """
        return self._evaluator.excess_by_combination(cuts, np.searchsorted(self._evaluator.allowed, self.combinations))

    def _recompute_us(self, cuts: IntArray) -> FloatArray:
        forward_us = np.diff(self._evaluator.case.sums.forward_us[cuts], axis=1)
        # "always" counts slightly more than "except-last", because it also recomputes the last micro-batch.
        weights = np.where(self.combinations > 0, 1 + self.combinations * 1e-3, 0.0)
        return np.stack([forward_us[:, stages] @ weights.T for stages in self._evaluator.stages], axis=2)
