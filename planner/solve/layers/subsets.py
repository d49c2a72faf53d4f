"""Every subset of the layers of a short stage that may be worth recomputing: none of them is beaten by another.

A subset is as good as another if it takes no more time, and with it the stage holds no more and has no higher level,
whatever runs. Then that is so at every moment of every device, for which a subset is worth looking at or not once for
all.

Complexity: O(2^n n) for n layers, and the square of that for leaving out what is beaten.
"""

from typing import NamedTuple

import numpy as np

from planner.core.cost.layer_memory import StageLayers
from planner.solve.space.arrays import BoolArray, FloatArray

MOST_LAYERS = 9
"""In longer stages subsets are too many."""


class Subsets(NamedTuple):
    """Subsets of a stage's layers, the fastest first."""

    recomputed: BoolArray
    """Which layers, shape (N, layers)."""
    times_us: FloatArray
    """To compute them again, shape (N,)."""
    saved: FloatArray
    """Held of a micro-batch, shape (N,)."""
    levels: FloatArray
    """By position in `LayerPeaks`, shape (N, 3); and 0 in a last column, where no layer runs."""

    @classmethod
    def of(cls, layers: StageLayers, times_us: FloatArray) -> "Subsets":
        """The subsets of a stage of at most `MOST_LAYERS` layers.

        Args:
            layers: The stage.
            times_us: To compute each layer again, shape (layers,).
        """
        trained = np.flatnonzero(layers.can_recompute)
        every = np.zeros((1 << len(trained), len(times_us)), dtype=np.bool_)
        every[:, trained] = (np.arange(len(every))[:, None] >> np.arange(len(trained))) & 1
        recompute_us: FloatArray = every @ times_us
        order = np.lexsort((every.sum(axis=1), recompute_us))
        saved, *levels = (each[order] for each in layers.many_levels(every))
        numbers = np.stack([recompute_us[order], saved, *levels], axis=1)
        best = _unbeaten(numbers)
        at_best = numbers[best]
        return cls(
            every[order][best], at_best[:, 0], at_best[:, 1], np.column_stack([at_best[:, 2:], np.zeros(len(at_best))])
        )


def _unbeaten(numbers: FloatArray) -> BoolArray:
    """Which rows no other one before is as low as everywhere; rows ascend by the first number."""
    unbeaten = np.ones(len(numbers), dtype=np.bool_)
    for n in range(len(numbers)):
        if unbeaten[n]:
            unbeaten[n + 1 :] &= (numbers[n + 1 :] < numbers[n]).any(axis=1)
    return unbeaten
