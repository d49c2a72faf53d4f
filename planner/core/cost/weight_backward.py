"""Compute the highest memory during weight-gradient passes (W), for many stages at once.

W of a stage runs from its last layer to its first. While it runs for one layer, these bytes exist:

    held         tensors that earlier layers have stored since the input-gradient pass (I)
    peak         of the layer itself: what it has stored and, in the first W, the gradients that it creates
    gradients    of the later layers, in the first W; later ones exist all the time, and are not counted here

Under autocast, gradients of cached low-precision weights of the later layers also exist, in every W. The copies were
recorded before everything else, so autograd processes them last. Then each becomes a gradient of the parameter, twice
as large.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, sums_before
from planner.core.cost.passing import RelayedTensors

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def weight_peaks(
    costs: ChainCosts, passing: RelayedTensors, firsts: IntArray, layers: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the highest level in the first W, including its gradients, and in a later W, from exact records.

    Args:
        costs: Costs of the chain.
        passing: Received tensors that the same stages send on.
        firsts: First layers.
        layers: Consecutive last layers.

    Returns:
        Two arrays of bytes, shape (firsts, layers).
    """
    halves, casts, levels = costs.halves, costs.state.casts, weight_levels(costs)
    first = _highest(passing, levels.first, levels.waiting, layers, is_first=True)
    later = _highest(passing, halves.weight, casts, layers, is_first=False)
    held_before = sums_before(halves.held)[firsts][:, None]
    first, later = first - held_before, later - held_before
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
    """Levels by layer that, with `Halves.weight`, decide the highest W; arrays of shape (L,) in bytes."""

    first: FloatArray
    """Level in the first W, including `waiting` of all later layers of the chain."""
    waiting: FloatArray
    """Gradients that exist from the layer's W until the end of the pass."""
    turning: FloatArray
    """Memory for converting the gradients of the layer's cached copies to those of parameters, on top of all copies'
    gradients."""


def weight_levels(costs: ChainCosts) -> WeightLevels:
    """Return the levels of W that do not depend on where a stage begins and ends."""
    halves, casts = costs.halves, costs.state.casts
    made = halves.weight_gradients
    # A parameter with a low-precision copy first has a gradient of the copy.
    waiting = casts + np.maximum(made - 2 * casts, 0.0) if casts.any() else made
    # At the end, nothing is held.
    turning = np.maximum(halves.weight - sums_before(halves.held)[:-1] - _sums_after(casts) - casts, 0.0)
    return WeightLevels(halves.first_weight - _sums_after(made) + _sums_after(waiting), waiting, turning)


def _highest(
    passing: RelayedTensors, levels: FloatArray, later_bytes: FloatArray, layers: IntArray, *, is_first: bool
) -> FloatArray:
    """Return the highest of `levels`, minus what `later_bytes` counts for layers after each stage's end."""
    highest = passing.highest_weight_backward(levels[layers], "first" if is_first else "later")
    return highest - _sums_after(later_bytes)[None, layers]


def _sums_after(per_layer: FloatArray) -> FloatArray:
    beyond: FloatArray = per_layer.sum() - np.cumsum(per_layer)
    return beyond
