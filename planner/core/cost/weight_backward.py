"""Compute the highest memory during weight-gradient passes (W), for many stages at once.

W of a stage runs from the last layer to the first layer. While W of one layer runs, these bytes exist:

    held         tensors that earlier layers have stored for W since the input-gradient pass (I)
    peak         memory of the layer itself: what it has stored for W and, in the first W, the gradients that it creates
    gradients    gradients of the later layers, in the first W; in a later W they always exist, and count elsewhere

Under autocast, gradients of the cached low-precision copies of later layers' weights also exist, in every W. The copies
were recorded before all other operations, so that autograd processes them last. Each gradient is then converted to a
gradient of the parameter, which is twice as large.
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
    """Return the highest memory in the first W, including the gradients that it creates, and in a later W.

    Args:
        costs: Costs of the chain.
        passing: Tensors that the same stages receive and send on.
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
    """Highest memory of W of each layer, with waiting gradients of autocast copies; arrays of shape (L,) in bytes."""

    first: FloatArray
    """Highest memory in the first W, including `waiting` of all later layers of the chain."""
    waiting: FloatArray
    """Bytes of the layer's gradients that exist from the layer's W until W of the whole stage ends."""
    turning: FloatArray
    """Memory to convert the gradients of the layer's autocast copies to gradients of parameters, on top of the
    gradients of all copies."""


def weight_levels(costs: ChainCosts) -> WeightLevels:
    """Return the highest memory of W of each layer, for stages that end with the last layer of the chain."""
    halves, casts = costs.halves, costs.state.casts
    made = halves.weight_gradients
    # A parameter with a low-precision copy first has a gradient of the copy.
    waiting = casts + np.maximum(made - 2 * casts, 0.0) if casts.any() else made
    # At the end of W, no tensors are stored for W.
    turning = np.maximum(halves.weight - sums_before(halves.held)[:-1] - _sums_after(casts) - casts, 0.0)
    return WeightLevels(halves.first_weight - _sums_after(made) + _sums_after(waiting), waiting, turning)


def _highest(
    passing: RelayedTensors, levels: FloatArray, later_bytes: FloatArray, layers: IntArray, *, is_first: bool
) -> FloatArray:
    """Return the highest of `levels` over each stage's layers, minus the `later_bytes` of all layers after the stage.

    `levels` include the `later_bytes` of all later layers of the chain.
    """
    highest = passing.highest_weight_backward(levels[layers], "first" if is_first else "later")
    return highest - _sums_after(later_bytes)[None, layers]


def _sums_after(per_layer: FloatArray) -> FloatArray:
    beyond: FloatArray = per_layer.sum() - np.cumsum(per_layer)
    return beyond
