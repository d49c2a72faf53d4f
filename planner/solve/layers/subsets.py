"""Subsets of a short stage's layers that may be worth recomputing, because no other subset dominates them.

A subset dominates another one if it takes no more time to recompute, saves no more bytes for the backward, and has no
higher peak in any pass. It is then at least as good at any point in the step, on any device.

Complexity: O(2^n n) for n layers, and O(4^n) to compare the subsets.
"""

from typing import NamedTuple

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray
from planner.core.cost.layer_memory import StageLayerMemory

MOST_LAYERS = 9
"""Largest number of layers of a stage whose subsets are listed."""


class LayerSubsets(NamedTuple):
    """Subsets of a stage's layers that may be worth recomputing, one per row, fastest first."""

    recomputed: BoolArray
    """True for layers in the subset, shape (subsets, layers)."""
    times_us: FloatArray
    """Time to recompute the layers of each subset, shape (subsets,)."""
    saved: FloatArray
    """Bytes that a micro-batch saves for its backward if the subset is recomputed, shape (subsets,)."""
    peaks: FloatArray
    """Peak memory in bytes, one column per field of `LayerPeaks`, and a column of zeros; shape (subsets, 4)."""

    @classmethod
    def of(cls, layers: StageLayerMemory, times_us: FloatArray) -> "LayerSubsets":
        """Return the useful subsets of at most `MOST_LAYERS` layers; `times_us` is the time to recompute each layer."""
        trained = np.flatnonzero(layers.can_recompute)
        every = np.zeros((1 << len(trained), len(times_us)), dtype=np.bool_)
        every[:, trained] = (np.arange(len(every))[:, None] >> np.arange(len(trained))) & 1
        recompute_us: FloatArray = every @ times_us
        order = np.lexsort((every.sum(axis=1), recompute_us))
        saved, *peaks = (each[order] for each in layers.saved_and_peaks_by_choice(every))
        numbers = np.stack([recompute_us[order], saved, *peaks], axis=1)
        best = _unbeaten(numbers)
        at_best = numbers[best]
        return cls(
            every[order][best], at_best[:, 0], at_best[:, 1], np.column_stack([at_best[:, 2:], np.zeros(len(at_best))])
        )


def _unbeaten(numbers: FloatArray) -> BoolArray:
    unbeaten = np.ones(len(numbers), dtype=np.bool_)
    for n in range(len(numbers)):
        if unbeaten[n]:
            unbeaten[n + 1 :] &= (numbers[n + 1 :] < numbers[n]).any(axis=1)
    return unbeaten
