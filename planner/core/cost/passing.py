"""Compute the memory of tensors that a stage receives and sends on, and of storages that are counted twice.

A skip connection crosses every boundary between the layer that creates it and the last layer that reads it. On a stage
between them, it is input and output at the same time, in one storage. So is its gradient, unless a layer of the stage
also reads the tensor and adds to the gradient.
"""

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.waiting import Backward, waiting_rows

_BLOCK = 512
"""Number of last layers that are processed at once."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class RelayedTensors:
    """Whole bytes that stages receive and send on, for every first layer (rows) and last layer (columns).

    Arrays have that shape or broadcast to it. Tensors that a stage sends on are those that it receives and sends
    unchanged. A stage that copies its input sends the copy, which is another tensor.

    Args:
        costs: Costs of the chain.
        firsts: First layers, in any order.
        layers: Consecutive last layers, ascending.
    """

    def __init__(self, costs: ChainCosts, firsts: IntArray, layers: IntArray) -> None:
        self._is_first = layers[None, :] == firsts[:, None]
        self._after_first = layers[None, :] > firsts[:, None]

        def spans(sizes: FloatArray) -> FloatArray:
            # A storage passes the layers after its maker and before the last one that receives it.
            return _spanning(costs.storages.maker + 1, costs.storages.until - 1, np.rint(sizes), firsts, layers)

        received = (costs.boundaries.copied_input[firsts] == 0)[:, None]
        by_readers = spans(costs.storages.kept_by_readers)
        self.unkept = spans(costs.storages.kept_by_nobody) * received
        """Bytes that are received and sent on, and that no layer of the chain saves."""
        self.all = self.unkept + (by_readers + spans(costs.storages.kept_by_maker)) * received
        """All bytes that are received and sent on."""
        self._relays = costs.relays.first - 1, costs.relays.last, np.rint(costs.relays.bytes)
        self._costs, self._firsts, self._layers = costs, firsts, layers
        self.kept = _passed_by(costs)[layers] - by_readers
        """Bytes that layers of the stage except the last one create, that are sent, and that a layer reading them
        saves."""

    def received_input(self, sizes: FloatArray, own_input: FloatArray) -> FloatArray:
        """Return the part of each layer's input that the stage has received: `own_input` for its first layer.

        Args:
            sizes: `unkept` or `all`.
            own_input: Input of each of `layers`, in bytes.
        """
        return np.where(self._is_first, own_input, _one_layer_later(sizes))

    def gradients(self, ends: IntArray) -> FloatArray:
        """Return the bytes of received gradients that a stage hands on to earlier layers, down to each of `layers`.

        The layer that created the tensor, or that adds to its gradient, is the last one to store such a gradient.

        Args:
            ends: Consecutive last layers of stages.

        Returns:
            Shape (layers, ends), or broadcast to it.
        """
        return _spanning(*self._relays, self._layers, ends)

    def highest_backward(self, tops: FloatArray, end_twice: FloatArray, backward: Backward | None = None) -> FloatArray:
        """Return the highest level among the backwards of a stage's layers.

        The stage's output and its gradient are not part of it: both are stored once per stage.

        Args:
            tops: Level of each of `layers`.
            end_twice: Bytes counted twice if the stage ends at a layer (`ChainCosts.end_twice`), for each of `layers`.
            backward: First or later backward, to include gradients of shared parameters that wait; None to leave them
                out.
        """
        inside = self._is_first | self._after_first
        blocks = range(0, len(self._layers), _BLOCK)
        before_end = np.concatenate(
            [self._highest_before(tops, slice(n, n + _BLOCK), backward) for n in blocks], axis=1
        )
        at_end = tops - end_twice - self.kept + self._waiting_at_end(backward)
        highest = np.maximum(before_end, at_end) - self.all
        return np.where(inside, highest, 0.0)

    def highest_weight_backward(self, tops: FloatArray, backward: Backward) -> FloatArray:
        """Return the highest level among the weight-gradient passes (W) of a stage's layers.

        No received tensor is sent on in W. Gradients of shared parameters wait for each other.

        Args:
            tops: Level of each of `layers`.
            backward: First or later W.
        """
        running = np.maximum.accumulate(np.where(self._is_first | self._after_first, tops, 0.0), axis=1)
        if not self._costs.ties:
            return running
        for n in range(0, len(self._layers), _BLOCK):
            ends = self._layers[n : n + _BLOCK]
            levels = np.where(self._layers[:, None] <= ends, tops[:, None], -np.inf)
            for waiting in waiting_rows(self._costs, backward, self._firsts, layers=self._layers, ends=ends):
                rows = np.maximum(self._highest_from(levels + waiting.bytes), 0.0)
                running[waiting.rows, n : n + _BLOCK] = rows[waiting.rows]
        return running

    def _waiting_at_end(self, backward: Backward | None) -> FloatArray:
        """Return the waiting gradients during the backward of a stage's last layer, shape (firsts, layers)."""
        found = np.zeros((len(self._firsts), len(self._layers)))
        if backward != "later" or not self._costs.ties:
            return found
        for n in range(0, len(self._layers), _BLOCK):
            ends = self._layers[n : n + _BLOCK]
            for waiting in waiting_rows(self._costs, backward, self._firsts, layers=ends, ends=ends):
                found[waiting.rows, n : n + _BLOCK] = np.diag(waiting.bytes)
        return found

    def _highest_before(self, tops: FloatArray, block: slice, backward: Backward | None) -> FloatArray:
        """Return the highest level of the layers before the last one, for last layers in `block`; else -inf."""
        ends = self._layers[block]
        levels = np.where(self._layers[:, None] < ends, tops[:, None] - self.gradients(ends), -np.inf)
        rows = self._highest_from(levels)
        if backward is not None:
            for waiting in waiting_rows(self._costs, backward, self._firsts, layers=self._layers, ends=ends):
                rows[waiting.rows] = self._highest_from(levels + waiting.bytes)[waiting.rows]
        return rows

    def _highest_from(self, levels: FloatArray) -> FloatArray:
        from_here = np.maximum.accumulate(levels[::-1], axis=0)[::-1]
        rows: FloatArray = from_here[self._firsts - self._layers[0]]
        return rows


class NothingRelayed:
    """Replacement for `RelayedTensors` in chains that `is_simple`: no stage receives tensors only to send them on.

    Args:
        first: First layers, shape (rows, 1).
        last: Last layers, ascending in each row; shape (rows, columns) or (1, columns).
    """

    def __init__(self, first: IntArray, last: IntArray) -> None:
        self._is_first, self._inside = last == first, last >= first
        self.unkept = self.all = np.zeros((1, 1))

    def received_input(self, _sizes: FloatArray, own_input: FloatArray) -> FloatArray:
        """Return the part of the input of each layer that the stage has received: `own_input` for its first layer."""
        return np.where(self._is_first, own_input, 0.0)

    def highest_backward(
        self, tops: FloatArray, end_twice: FloatArray, _backward: Backward | None = None
    ) -> FloatArray:
        """Return the highest level among the backwards of a stage's layers; see `RelayedTensors.highest_backward`."""
        highest = np.maximum.accumulate(np.where(self._inside, tops, -np.inf), axis=1)
        before_end = np.concatenate([np.full((len(highest), 1), -np.inf), highest[:, :-1]], axis=1)
        return np.where(self._inside, np.maximum(before_end, tops - end_twice), 0.0)


def is_simple(costs: ChainCosts) -> bool:
    """Return True if no tensor skips a layer and no layers share parameters."""
    storages = costs.storages
    kept = storages.kept_by_readers + storages.kept_by_maker + storages.kept_by_nobody
    return not (costs.ties or costs.relays.bytes.any() or kept[storages.until > storages.maker + 1].any())


def _spanning(begins: IntArray, ends: IntArray, sizes: FloatArray, firsts: IntArray, layers: IntArray) -> FloatArray:
    """Return the total bytes of the spans of layers `begins`..`ends` that contain a whole stage.

    Shape (first layers, last layers), or (1, 1) without spans.

    Complexity: O(spans + firsts * layers).
    """
    some = (begins <= ends) & (begins <= firsts.max()) & (ends >= layers[0]) & (sizes > 0)
    if not some.any():
        return np.zeros((1, 1))
    order = np.argsort(firsts)
    covered_from = np.zeros((len(firsts), len(layers)))
    rows = np.searchsorted(firsts[order], begins[some])
    np.add.at(covered_from, (rows, np.minimum(ends[some] - layers[0], len(layers) - 1)), sizes[some])
    covered = np.empty_like(covered_from)
    covered[order] = np.cumsum(np.cumsum(covered_from, axis=0)[:, ::-1], axis=1)[:, ::-1]
    return covered


def _passed_by(costs: ChainCosts) -> FloatArray:
    """Return the bytes that skip each layer and that a later layer saves, shape (L,)."""
    sizes, begins = np.rint(costs.storages.kept_by_readers), costs.storages.maker + 1
    change = np.zeros(costs.num_layers + 2)
    np.add.at(change, begins, sizes)
    np.add.at(change, np.maximum(costs.storages.until, begins), -sizes)
    passed: FloatArray = np.cumsum(change)[: costs.num_layers]
    return passed


def _one_layer_later(values: FloatArray) -> FloatArray:
    if values.shape[1] == 1:
        return values  # no layer, or a single one, which has no previous one
    return np.concatenate([np.zeros((len(values), 1)), values[:, :-1]], axis=1)
