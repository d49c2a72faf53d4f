"""Compute memory of gradients of parameters that several layers of a stage share.

Autograd sums the gradients of all uses of a parameter within a micro-batch, and adds the sum to the gradient of earlier
micro-batches. So a second copy of the gradient exists from the backward of the last layer that uses the parameter to
that of the first one. In the first backward, the sum becomes the gradient itself. It then exists once, not once for
each of these layers.

During the backward of the last of these layers, the gradients that it has created so far already wait. The difference
between its first backward, in which all gradients stay, and a later one shows how much this raises the peak. The shared
parameters are assigned their share of that difference, by the size of their gradients.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts

Backward = Literal["first", "later"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Waiting(NamedTuple):
    """Bytes of gradients that wait in the stages that begin with some first layers."""

    rows: NDArray[np.bool_]
    """True for each first layer (of those passed to `waiting_rows`) whose stages this record describes; shape
    (firsts,)."""
    bytes: FloatArray
    """Bytes to add to the level while a layer's backward runs, in the stage with a given last layer; shape (layers,
    ends). Levels of the first backward already count the gradients of all later layers; levels of a later one count
    none."""


def waiting_rows(
    costs: ChainCosts, backward: Backward, firsts: IntArray, *, layers: IntArray, ends: IntArray
) -> Iterator[Waiting]:
    """Yield the gradients that wait, for groups of stages that contain the same shared parameters.

    Args:
        costs: Costs of the chain.
        backward: Backward of the first micro-batch, or of a later one.
        firsts: First layers of stages.
        layers: Layers whose backward runs.
        ends: Last layers of stages.

    Complexity: O(ties * layers * ends).
    """
    waiting, staying = np.zeros((len(layers), len(ends))), staying_gradients(costs)
    begins = sorted({tie.first for tie in costs.ties if tie.gradient_bytes > 0}, reverse=True)
    for begin, before in pairwise((*begins, -1)):
        for tie in (tie for tie in costs.ties if tie.first == begin):
            twice = -1.0 * (layers < tie.first)
            between = 1.0 * ((layers >= tie.first) & (layers < tie.second))
            count = twice if backward == "first" else between
            waiting = waiting + np.outer(count, ends >= tie.second) * np.rint(tie.gradient_bytes)
            if backward == "later":
                is_last_use = (ends >= tie.second) & (ends < _next_use(costs, tie.second))
                share = tie.gradient_bytes / max(1.0, costs.gradients[tie.second])
                own = np.rint(staying[tie.second] * min(1.0, share))
                waiting = waiting + np.outer(layers == tie.second, is_last_use) * own
        rows = (firsts <= begin) & (firsts > before)
        if rows.any():
            yield Waiting(rows, waiting)


def staying_gradients(costs: ChainCosts) -> FloatArray:
    """Return by how much the peak of each layer's backward grows if all gradients that it makes stay, shape (L,)."""
    first = costs.levels.first_backward + np.cumsum(costs.gradients) - costs.gradients.sum()
    later = costs.levels.backward + np.cumsum(costs.state.casts) - costs.state.casts.sum()
    staying: FloatArray = np.rint(np.maximum(first - later, 0.0))
    return staying


def _next_use(costs: ChainCosts, layer: int) -> float:
    """Return the next layer that uses the parameters that `layer` shares with an earlier one; infinite without one."""
    return min((tie.second for tie in costs.ties if tie.first == layer), default=np.inf)


def waiting_in(costs: ChainCosts, backward: Backward, first: int, end: int) -> FloatArray:
    """Return the gradients that wait while the backward of each layer of one stage runs.

    Args:
        costs: Costs of the chain.
        backward: Backward of the first micro-batch, or of a later one.
        first: First layer of the stage.
        end: One past its last layer.

    Returns:
        Bytes, shape (end - first,).
    """
    firsts, layers = np.array([first]), np.arange(first, end)
    for waiting in waiting_rows(costs, backward, firsts, layers=layers, ends=layers[-1:]):
        return waiting.bytes[:, 0]
    return np.zeros(end - first)
