"""Peak memory of weight-gradient passes (W), for many stages at once.

W of a stage runs from the last layer to the first layer. While W of one layer runs, these bytes exist:

    held         tensors that earlier layers have stored for W since the input-gradient pass (I)
    peak         memory of the layer itself: what it has stored for W and, in the first micro-batch, its gradients
    gradients    gradients of the later layers, in the first micro-batch

Under autocast, gradients of later layers' low-precision weight copies exist until the end of W. Each is then converted
to a gradient of the parameter, which is twice as large.
"""

from typing import TYPE_CHECKING

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.chain_costs import prefix_sums, suffix_sums
from planner.core.cost.passing import RelayedTensors
from planner.core.cost.waiting import shared_cast_bytes

if TYPE_CHECKING:
    from planner.core.cost.stages import StageMemoryTableBuilder


def weight_backward_peaks(builder: "StageMemoryTableBuilder", passing: RelayedTensors) -> tuple[FloatArray, FloatArray]:
    """Return the peak memory of each stage's weight-gradient pass in the first and in a later micro-batch, in bytes.

    The stages are those of `builder`: one row per first layer and one column per last layer.
    """
    costs, columns = builder.costs, builder.columns
    split_backward, casts = costs.split_backward, costs.state.casts
    created, held = split_backward.weight_gradients, prefix_sums(split_backward.held)
    held_before = held[builder.firsts][:, None]
    # Gradients that exist from a layer's W until W of the whole stage ends. A parameter with a low-precision copy first
    # has a gradient of the copy.
    waiting = casts + np.maximum(created - 2 * casts, 0.0) if casts.any() else created
    # The peaks include gradients of all later layers of the chain. Gradients of layers after the stage are subtracted.
    first_of_layers = split_backward.first_weight - suffix_sums(created) + suffix_sums(waiting)
    first = passing.peak_weight_backward(first_of_layers[columns], "first")
    first = first - suffix_sums(waiting)[None, columns] - held_before
    later = passing.peak_weight_backward(split_backward.weight[columns], "later")
    later = later - suffix_sums(casts)[None, columns] - held_before
    if not casts.any():
        return first, later
    # At the end of W, no tensors are stored for W. The gradients of all copies exist while each is converted to a
    # gradient of the parameter.
    converting = np.maximum(split_backward.weight - held[:-1] - suffix_sums(casts) - casts, 0.0)
    of_copies = builder.sums(casts) - shared_cast_bytes(costs, builder.first, builder.last)
    at_end = np.where(of_copies > 0, of_copies + builder.highest(converting[columns]), 0.0)
    at_end_of_first = builder.sums(split_backward.weight_gradients) + builder.highest(casts[columns])
    return np.maximum(first, at_end_of_first), np.maximum(later, at_end)
