"""Peak memory of weight-gradient passes (W), for many stages at once.

W of a stage runs from the last layer to the first layer. While W of one layer runs, these bytes exist:

    held         tensors that earlier layers have stored for W since the input-gradient pass (I)
    peak         memory of the layer itself: what it has stored for W and, in the first W, the gradients that it creates
    gradients    gradients of the later layers, in the first W; in a later W they always exist, and count elsewhere

Under autocast, gradients of the cached low-precision copies of later layers' weights also exist, in every W. The copies
were recorded before all other operations, so that autograd processes them last. Each gradient is then converted to a
gradient of the parameter, which is twice as large.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.chain_costs import ChainCosts, prefix_sums, suffix_sums
from planner.core.cost.passing import RelayedTensors

if TYPE_CHECKING:
    from planner.core.cost.stages import StageTableBuilder


def weight_peaks(builder: "StageTableBuilder", passing: RelayedTensors) -> tuple[FloatArray, FloatArray]:
    """Return the peak memory of each stage's first weight-gradient pass (W), and of a later W.

    The first W includes the gradients that it creates.

    Args:
        builder: Builder of the table of stages.
        passing: Tensors that these stages receive and send on.

    Returns:
        Two arrays of bytes, one row per first layer and one column per last layer.
    """
    costs, columns, split_backward, casts = (
        builder.costs,
        builder.columns,
        builder.costs.split_backward,
        builder.costs.state.casts,
    )
    levels, held_before = weight_backward_peaks(costs), prefix_sums(split_backward.held)[builder.firsts][:, None]
    # Levels include gradients of all later layers of the chain.
    first = passing.peak_weight_backward(levels.first[columns], "first")
    first = first - suffix_sums(levels.waiting)[None, columns] - held_before
    later = passing.peak_weight_backward(split_backward.weight[columns], "later")
    later = later - suffix_sums(casts)[None, columns] - held_before
    if not casts.any():
        return first, later
    waiting = builder.sums(casts)
    at_end = np.where(waiting > 0, waiting + builder.highest(levels.turning[columns]), 0.0)
    at_end_of_first = builder.sums(split_backward.weight_gradients) + builder.highest(casts[columns])
    return np.maximum(first, at_end_of_first), np.maximum(later, at_end)


class WeightBackwardPeaks(NamedTuple):
    """Peak memory of each layer's weight-gradient pass (W) under autocast, in bytes; one array entry per layer."""

    first: FloatArray
    """Peak memory of the first W, including `waiting` of all later layers of the chain."""
    waiting: FloatArray
    """Bytes of the layer's gradients that exist from the layer's W until W of the whole stage ends."""
    turning: FloatArray
    """Memory to convert the gradients of the layer's autocast copies to gradients of parameters, on top of the
    gradients of all copies."""


def weight_backward_peaks(costs: ChainCosts) -> WeightBackwardPeaks:
    """Return the peak memory of each layer's weight-gradient pass, for stages that end with the last layer."""
    split_backward, casts = costs.split_backward, costs.state.casts
    made = split_backward.weight_gradients
    # A parameter with a low-precision copy first has a gradient of the copy.
    waiting = casts + np.maximum(made - 2 * casts, 0.0) if casts.any() else made
    # At the end of W, no tensors are stored for W.
    turning = np.maximum(
        split_backward.weight - prefix_sums(split_backward.held)[:-1] - suffix_sums(casts) - casts, 0.0
    )
    return WeightBackwardPeaks(split_backward.first_weight - suffix_sums(made) + suffix_sums(waiting), waiting, turning)
