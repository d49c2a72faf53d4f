"""The highest of W, the half of a backward that makes gradients of weights, for many stages at once.

A stage's W goes from its last layer to its first. While that of a layer runs there are

    held         what the layers in front of it have kept since I
    peak         of the layer itself, what it has kept and, in the first W, the gradients that it makes included
    gradients    in the first W, of the layers behind it; in a later one they are there whatever runs, and not counted

Under autocast the gradients of low-precision copies of weights are there for the layers behind, in every W: the copies
were recorded long before it, so autograd turns to them when all else is done. Then each becomes a gradient of the
parameter, twice as large.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, sums_before
from planner.core.cost.passing import Passing

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def weight_peaks(
    costs: ChainCosts, passing: Passing, firsts: IntArray, layers: IntArray
) -> tuple[FloatArray, FloatArray]:
    """The highest in the first W, its gradients included, and in a later one; from exact records.

    Args:
        costs: The chain.
        passing: Of the same stages.
        firsts: First layers.
        layers: Last layers, one after the other.

    Returns:
        Bytes, of shape (firsts, layers).
    """
    halves, casts, levels = costs.halves, costs.state.casts, weight_levels(costs)
    first = _highest(passing, levels.first, levels.waiting, layers, is_first=True)
    later = _highest(passing, halves.weight, casts, layers, is_first=False)
    in_front = sums_before(halves.held)[firsts][:, None]
    first, later = first - in_front, later - in_front
    if not casts.any():
        return first, later

    def sums(per_layer: FloatArray) -> FloatArray:
        through = sums_before(per_layer)
        between: FloatArray = through[layers + 1][None, :] - through[firsts][:, None]
        return between

    def largest(per_layer: FloatArray) -> FloatArray:
        inside = layers[None, :] >= firsts[:, None]
        highest: FloatArray = np.maximum.accumulate(np.where(inside, per_layer[layers], 0.0), axis=1)
        return highest

    at_end = np.where(sums(casts) > 0, sums(casts) + largest(levels.turning), 0.0)
    return np.maximum(first, sums(halves.weight_gradients) + largest(casts)), np.maximum(later, at_end)


class WeightLevels(NamedTuple):
    """What the highest W is found among beside `Halves.weight`, by layer; arrays of shape (L,)."""

    first: FloatArray
    """During the first W; `waiting` of the layers behind is counted, to the end of the chain."""
    waiting: FloatArray
    """Gradients that are there from the layer's W on."""
    turning: FloatArray
    """What turning the gradients of the layer's copies into those of parameters takes, beside all copies' gradients."""


def weight_levels(costs: ChainCosts) -> WeightLevels:
    """The levels of W that do not depend on where a stage begins and ends."""
    halves, casts = costs.halves, costs.state.casts
    made = halves.weight_gradients
    # Of parameters with a copy there is the gradient of the copy first.
    waiting = casts + np.maximum(made - 2 * casts, 0.0) if casts.any() else made
    # At the end nothing is held any more.
    turning = np.maximum(halves.weight - sums_before(halves.held)[:-1] - _behind(casts) - casts, 0.0)
    return WeightLevels(halves.first_weight - _behind(made) + _behind(waiting), waiting, turning)


def _highest(
    passing: Passing, levels: FloatArray, behind: FloatArray, layers: IntArray, *, is_first: bool
) -> FloatArray:
    """The highest of `levels`, in which `behind` is summed to the end of the chain, where stages end sooner."""
    highest = passing.highest_weight_backward(levels[layers], "first" if is_first else "later")
    return highest - _behind(behind)[None, layers]


def _behind(per_layer: FloatArray) -> FloatArray:
    beyond: FloatArray = per_layer.sum() - np.cumsum(per_layer)
    return beyond
