"""Memory of waiting gradients, which belong to parameters that several layers of a stage share.

Let layer p and a later layer q share a parameter. Within a micro-batch, autograd sums the gradients of both uses. It
adds the sum to the gradient of earlier micro-batches. So from the backward of q to that of p, two gradients exist:
the gradient of earlier micro-batches, and q's gradient (the *waiting gradient*). In the first micro-batch, there is no
earlier gradient, and the sum becomes the parameter's gradient.

Autograd sums in place, unless q's gradient is a view of another tensor, as for the weight of a linear layer. Then the
sum is a new tensor, and three tensors exist during p's backward. The sum is no view, so gradients of further layers
are added to it in place.

In later micro-batches, q's other gradients are freed during q's backward, as soon as they are added to the existing
gradients. The waiting gradient is not freed, and therefore raises the peak of q's backward:

    increase = (peak of q in the first micro-batch - peak of q in a later one) * share of shared parameters
    share    = gradient bytes of shared parameters / gradient bytes of q

Under autocast, q's gradient is that of a low-precision copy of the parameter. In later micro-batches, gradients of
copies are not counted here, because `FixedLayerBytes.casts` counts them until the end of the backward. If p uses no
copy (an embedding), q's gradient is converted to the parameter's type before p's backward. If p and q use the same
copy, the first micro-batch converts the copy's gradient in p's backward, not in q's. Until then, this gradient has
half the bytes of the parameter's gradient.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts

Backward = Literal["first", "later"]


class WaitingGradients(NamedTuple):
    """Gradients of shared parameters that wait for the backward of an earlier layer, for a group of stages."""

    rows: BoolArray
    """True for each first layer whose stages belong to the group, shape (first layers,)."""
    bytes: FloatArray
    """Bytes to add to each layer's peak memory in backward, shape (layers, last layers of stages).

    Entry [i, j] is for layer i in a stage that ends with layer j. Negative entries correct
    other terms that include a shared gradient twice or too early.
    """


def waiting_gradients(
    costs: ChainCosts,
    backward: Backward,
    firsts: IntArray,
    *,
    layers: IntArray,
    ends: IntArray,
    converts: bool = True,
) -> Iterator[WaitingGradients]:
    """Yield, for each group of stages, the gradients of shared parameters that wait for an earlier layer's backward.

    Stages begin at `firsts` and end at `ends`, in all combinations. First layers with equal results form a group. First
    layers without waiting gradients are in no group.

    Args:
        costs: Costs of the layers.
        backward: `first` for the backward of the first micro-batch, `later` for the backward of any other micro-batch.
        firsts: First layers of stages.
        layers: Layers whose backwards need the bytes, as rows of `WaitingGradients.bytes`.
        ends: Last layers of stages.
        converts: False for a weight-gradient pass, which converts low-precision gradients (autocast) only at its end.

    Complexity: O(ties * layers * ends).
    """
    waiting, staying = np.zeros((len(layers), len(ends))), first_backward_excess_bytes(costs)
    begins = sorted({tie.first for tie in costs.ties if tie.gradient_bytes > 0}, reverse=True)
    for begin, before in pairwise((*begins, -1)):
        for tie in (tie for tie in costs.ties if tie.first == begin):
            # The sum over later layers counts a gradient that both uses share once for each use.
            twice = -1.0 * (layers < tie.first)
            between = 1.0 * ((layers >= tie.first) & (layers < tie.second))
            # Gradients of autocast copies are counted separately (`FixedLayerBytes.casts`). Layer `first` adds its own
            # to that of `second`, unless it uses no copy: then the gradient of the copy is converted there.
            own = tie.gradient_bytes - tie.converted_bytes
            after_first = (layers == tie.first) * np.rint(max(0.0, tie.converted_bytes - 2 * tie.cast_bytes))
            later = between * np.rint(own) + after_first + twice * np.rint(tie.cast_bytes)
            added = twice * np.rint(tie.gradient_bytes) if backward == "first" else later
            waiting = waiting + np.outer(added, ends >= tie.second)
            is_last_use = (ends >= tie.second) & (ends < _next_use(costs, tie.second))
            waiting = waiting + np.outer(layers == tie.first, is_last_use) * np.rint(tie.sum_bytes)
            if backward == "first" and converts:
                of_copies = min(tie.converted_bytes, 2 * tie.cast_bytes)
                unconverted = between * np.rint(of_copies / 2)
                # The first backward of `second` alone converts them. A later one does so at its end, and creates none.
                created = costs.gradients[tie.second] - of_copies
                unconverted += (layers == tie.second) * np.rint(max(0.0, staying[tie.second] - created))
                waiting = waiting - np.outer(unconverted, ends >= tie.second)
            if backward == "later":
                share = min(1.0, own / max(1.0, costs.gradients[tie.second]))
                waiting = waiting + np.outer(layers == tie.second, is_last_use) * np.rint(staying[tie.second] * share)
        rows = (firsts <= begin) & (firsts > before)
        if rows.any():
            yield WaitingGradients(rows, waiting)


def shared_cast_bytes(costs: ChainCosts, firsts: IntArray, ends: IntArray) -> FloatArray:
    """Return the bytes of autocast's low-precision weight copies that two layers of a stage share.

    Args:
        costs: Costs of the layers.
        firsts: First layers of stages.
        ends: Last layers of stages, of a shape that can be broadcast with that of `firsts`.
    """
    shared = np.zeros((1, 1))
    for tie in costs.ties:
        shared = shared + np.where((firsts <= tie.first) & (ends >= tie.second), np.rint(tie.cast_bytes), 0.0)
    return shared


def first_backward_excess_bytes(costs: ChainCosts) -> FloatArray:
    """Return by how many bytes the first backward of each layer exceeds the peak of its later backwards.

    The backward of the first micro-batch keeps the layer's parameter gradients. The backward of a later micro-batch
    frees each new gradient as soon as it is added to the existing gradient.

    Returns:
        Peak in the first micro-batch minus peak in a later micro-batch, at least 0, shape (layers,). Neither peak
        includes gradients of later layers.
    """
    first = costs.memory.first_backward + np.cumsum(costs.gradients) - costs.gradients.sum()
    later = costs.memory.backward + np.cumsum(costs.state.casts) - costs.state.casts.sum()
    staying: FloatArray = np.rint(np.maximum(first - later, 0.0))
    return staying


def _next_use(costs: ChainCosts, layer: int) -> float:
    return min((tie.second for tie in costs.ties if tie.first == layer), default=np.inf)


def waiting_gradients_in_stage(costs: ChainCosts, backward: Backward, first: int, end: int) -> FloatArray:
    """Return the bytes of one stage's `WaitingGradients`.

    Args:
        costs: Costs of the layers.
        backward: `first` for the backward of the first micro-batch, `later` for the backward of any other micro-batch.
        first: First layer of the stage.
        end: One past its last layer.

    Returns:
        Bytes to add to the peak memory of each layer's backward, shape (end - first,).
    """
    firsts, layers = np.array([first]), np.arange(first, end)
    for waiting in waiting_gradients(costs, backward, firsts, layers=layers, ends=layers[-1:]):
        return waiting.bytes[:, 0]
    return np.zeros(end - first)
