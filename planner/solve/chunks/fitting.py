"""Choice of recomputation for given cuts, with several chunks per device.

The memory of a device depends on the choices of its own chunks only. A combination of choices is minimal if it fits but
would not fit if one or more chunks recomputed less. A fastest plan has minimal combinations, because more recomputation
never makes a step faster.

    V = 2 chunks, never (0) or always (2)     (0, 0)   (0, 2)   (2, 0)   (2, 2)
    fits?                                       no       yes      no       yes
    minimal?                                    no       yes      no       no

Complexity: C^V memory computations for each device of a partition, for C choices and V chunks per device.
"""

from functools import cached_property
from itertools import product

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.solve.space.partitions import Evaluator

_MOST_COMBINATIONS = 81
"""Largest number of combinations of a device that are all tried. If there are more, the first n chunks of the device
get the same choice, and its other chunks the choice with the least recomputation, for every possible n."""


class RecomputeFitter:
    """Search for the least recomputation with which given partitions fit into memory."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[bytes, tuple[int, float]] = {}
        """Cached results of `_best_combinations`: an index into `combinations`, and the bytes over the memory limit.

        A key has the cuts of a device's stages and the device index, as bytes.
        """

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
        """Return, for every stage, the allowed choice with the least recomputation. Memory limits are ignored.

        The result has the shape (num_partitions, stages).
        """
        return np.full((num_partitions, self._evaluator.num_stages), self._evaluator.allowed[0])

    def fit(self, cuts: IntArray, choices: IntArray, is_open: BoolArray) -> tuple[IntArray, FloatArray]:
        """Return recompute choices that fit into memory with the least recomputation time.

        If no choices fit on a device, return choices that exceed its memory limit least.

        Args:
            cuts: Cuts of each partition, shape (partitions, stages + 1).
            choices: Choices to keep where `is_open` is False, shape (partitions, stages).
            is_open: True for devices whose choices may change, shape (partitions, devices).

        Returns:
            Choices, shape (partitions, stages), and the bytes by which each device exceeds its memory limit, shape
            (partitions, devices).
        """
        evaluator = self._evaluator
        fitted = np.where(is_open[:, evaluator.device_of_stage], evaluator.allowed[0], choices)
        over = evaluator.excess_bytes(cuts, fitted)
        needs_more = is_open & (over > 0)
        if len(self.combinations) == 1:
            return fitted, over
        devices, rows = np.nonzero(needs_more.T)
        if len(rows):
            combination, least = self._best_combinations(cuts[rows], devices)
            fitted[rows[:, None], evaluator.stages[devices]] = self.combinations[combination]
            over[rows, devices] = least
        return fitted, over

    def _best_combinations(self, cuts: IntArray, devices: IntArray) -> tuple[IntArray, FloatArray]:
        # Return the index of the best combination for a device of each partition, and the bytes over its memory limit.
        # Moves of a local search often lead to the same stages of a device again.
        stages, rows = self._evaluator.stages[devices], np.arange(len(cuts))[:, None]
        bounds = np.concatenate([cuts[rows, stages], cuts[rows, stages + 1], devices[:, None]], axis=1)
        keys = [row.tobytes() for row in bounds]
        new = {key: n for n, key in enumerate(keys) if key not in self._known}
        if new:
            some = sorted(new.values())
            excess = self.excess_bytes_by_choices(cuts[some], devices[some])
            least = excess.min(axis=1, keepdims=True)
            recompute_us = np.where(excess == least, self._recompute_us(cuts[some], devices[some]), np.inf)
            best = zip(recompute_us.argmin(axis=1).tolist(), least[:, 0].tolist(), strict=True)
            self._known.update(zip([keys[n] for n in some], best, strict=True))
        combinations, over = zip(*[self._known[key] for key in keys], strict=True)
        return np.array(combinations), np.array(over)

    def minimal_combinations(self, cuts: IntArray) -> BoolArray:
        """Return True for combinations that fit on a device, but would not fit if a stage recomputed less.

        `cuts` has the shape (partitions, stages + 1), the result (partitions, devices, combinations).
        """
        num_devices = self._evaluator.num_devices
        devices = np.repeat(np.arange(num_devices), len(cuts))
        fits = self.excess_bytes_by_choices(np.tile(cuts, (num_devices, 1)), devices) <= 0
        minimal: BoolArray = fits & ~np.any(fits[:, :, None] & self._is_lower, axis=1)
        return minimal.reshape(num_devices, len(cuts), -1).swapaxes(0, 1)

    def excess_bytes_by_choices(self, cuts: IntArray, devices: IntArray) -> FloatArray:
        """Return the result of `Evaluator.excess_bytes_by_choices` for the choices in `combinations`."""
        return self._evaluator.excess_bytes_by_choices(cuts, devices, self._places)

    @cached_property
    def _is_lower(self) -> BoolArray:
        # True if the first combination recomputes less than the second one in a stage, and not more in others.
        is_lower: BoolArray = np.all(self.combinations[:, None] <= self.combinations[None], axis=2)
        return is_lower & ~np.eye(len(self.combinations), dtype=bool)

    @cached_property
    def _places(self) -> IntArray:
        return np.searchsorted(self._evaluator.allowed, self.combinations)

    @cached_property
    def _weights(self) -> FloatArray:
        # "always" counts slightly more than "except-last", because it also recomputes the last micro-batch.
        return np.where(self.combinations > 0, 1 + self.combinations * 1e-3, 0.0)

    def _recompute_us(self, cuts: IntArray, devices: IntArray) -> FloatArray:
        before_us, rows = self._evaluator.case.sums.forward_us, np.arange(len(cuts))[:, None]
        first, end = (cuts[rows, self._evaluator.stages[devices] + n] for n in (0, 1))
        recompute_us: FloatArray = (before_us[end] - before_us[first]) @ self._weights.T
        return recompute_us
