"""Sparse gradients, as of `nn.Embedding(sparse=True)`: they grow with every micro-batch.

The sum of two sparse gradients has the indices and values of both, whether or not they are of the same rows. With n
bytes of one micro-batch, (m - 1) n are there before the backward of the m-th, which makes n more and then their sum of
m n; the optimizer's step finds M n, and takes some multiple of that while it adds up what belongs to one row.
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np

from planner.core.cost.chain_costs import ChainCosts, Halves
from planner.core.values.profile import Profile

_MEASURED = 3
"""A later backward is measured with n bytes there before it: so many times n come on top, n + 2 n."""


def sparse_layer(profile: Profile) -> str | None:
    """The first layer with sparse gradients, which nothing sums over processes; None where there is none."""
    layers = (layer for layer in profile.layers if any(d.sparse_gradient_bytes for d in layer.detail))
    return next((layer.name for layer in layers), None)


def accumulated(costs: ChainCosts, micro_batches: int) -> ChainCosts:
    """The costs in steps of M micro-batches, sparse gradients taken to be there of all of them after the first.

    What comes back has been accumulated, and is left as it is by a second call.
    """
    sparse, state = costs.sparse.gradients, costs.state
    if not sparse.any():
        return costs
    step = micro_batches * sparse * costs.sparse.optimizer_peak
    peak = state.optimizer_peak + step if costs.optimizer_peaks_add else np.maximum(state.optimizer_peak, step)
    return replace(
        costs,
        sparse=replace(costs.sparse, gradients=np.zeros_like(sparse), accumulated=(micro_batches - 1) * sparse),
        state=replace(state, optimizer_peak=peak),
        # Of the last one's: 2 M n in all, of which M n are counted as gradients.
        levels=replace(
            costs.levels,
            backward=np.maximum(costs.levels.backward + (micro_batches - _MEASURED) * sparse, 0.0),
        ),
        composed_halves=cache(partial(_accumulated_halves, costs, micro_batches)),
    )


def _accumulated_halves(costs: ChainCosts, micro_batches: int) -> Halves:
    # Embeddings are put off, if any are.
    weight = costs.halves.weight + (micro_batches - _MEASURED) * costs.sparse.gradients
    return replace(costs.halves, weight=np.maximum(weight, 0.0))
