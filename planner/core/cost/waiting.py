"""Gradients of parameters that layers of one stage share: in a backward they wait for one another.

Autograd adds up what all uses of a parameter within a micro-batch come to, and adds the sum to the gradient that is
there from earlier ones. So from the backward of the last layer that uses it to that of the first, a copy of its
gradient is there beside the gradient itself. In the first backward there is none yet, and what has waited becomes it:
in front of the first of these layers it is there once, not once for each of them.

While the backward of the last of these layers runs, the gradients that it has made so far wait already. Its first
backward, in which all gradients stay, shows by how much that raises its peak. The shared ones have as large a share of
it as of the gradients.
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
    """What waits in some stages, those of some first layers."""

    rows: NDArray[np.bool_]
    """Which, among the first layers that were asked for."""
    bytes: FloatArray
    """Shape (layers, ends): while the backward of a layer runs, in the stage that ends with a layer. To be added to the
    level, in which the gradients of all layers behind count in the first backward, and none of them in a later one."""


def waiting_rows(
    costs: ChainCosts, backward: Backward, firsts: IntArray, *, layers: IntArray, ends: IntArray
) -> Iterator[Waiting]:
    """What waits, for stages that hold the same shared parameters together.

    Args:
        costs: The chain.
        backward: That of the first micro-batch, or of another.
        firsts: First layers of stages.
        layers: The layers that are asked for.
        ends: Last layers of stages.

    Complexity: O(ties · layers · ends).
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
                is_last_use = (ends >= tie.second) & (ends < _used_again(costs, tie.second))
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


def _used_again(costs: ChainCosts, layer: int) -> float:
    """Return the next layer that uses what `layer` shares with an earlier one; infinite without one."""
    return min((tie.second for tie in costs.ties if tie.first == layer), default=np.inf)


def waiting_in(costs: ChainCosts, backward: Backward, first: int, end: int) -> FloatArray:
    """The same for the layers of one stage, `first`..`end - 1`."""
    firsts, layers = np.array([first]), np.arange(first, end)
    for waiting in waiting_rows(costs, backward, firsts, layers=layers, ends=layers[-1:]):
        return waiting.bytes[:, 0]
    return np.zeros(end - first)
