"""Compute the memory of tensors that a stage receives and sends on, and of storages that are counted twice.

A skip connection crosses every boundary between the layer that creates it and the last layer that reads it. On a stage
between these layers, the tensor is input and output at the same time, in one storage. Its gradient is also input and
output in one storage, unless a layer of the stage reads the tensor and adds to the gradient.
"""

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.waiting import Backward, waiting_rows

_BLOCK = 512
"""Number of last layers that are processed at once."""


class RelayedTensors:
    """Bytes of tensors that a stage receives and sends on unchanged, for each pair of first and last layer of a stage.

    Arrays contain whole bytes, and have shape (firsts, layers) or broadcast to it. If a stage copies its input, it
    sends the copy, which is not the received tensor and does not count.

    Args:
        costs: Costs of the chain.
        firsts: First layers of stages, in any order.
        layers: Last layers of stages: consecutive and ascending.
    """

    def __init__(self, costs: ChainCosts, firsts: IntArray, layers: IntArray) -> None:
        self._is_first = layers[None, :] == firsts[:, None]
        self._after_first = layers[None, :] > firsts[:, None]

        def spans(sizes: FloatArray) -> FloatArray:
            # A storage skips the layers after the layer that makes it and before the last layer that receives it.
            return _spanning(costs.storages.maker + 1, costs.storages.until - 1, np.rint(sizes), firsts, layers)

        received = (costs.boundaries.copied_input[firsts] == 0)[:, None]
        by_readers = spans(costs.storages.kept_by_readers)
        self.unkept = spans(costs.storages.kept_by_nobody) * received
        """Bytes of tensors that the stage receives and sends on, and that no layer of the chain saves."""
        self.all = self.unkept + (by_readers + spans(costs.storages.kept_by_maker)) * received
        """Bytes of all tensors that the stage receives and sends on."""
        self._relays = costs.relays.first - 1, costs.relays.last, np.rint(costs.relays.bytes)
        self._costs, self._firsts, self._layers = costs, firsts, layers
        self.kept = _bypassing_bytes(costs)[layers] - by_readers
        """Bytes of tensors that the stage creates before its last layer and sends, and that a receiving layer saves."""

    def received_input(self, sizes: FloatArray, own_input: FloatArray) -> FloatArray:
        """Return the bytes of each layer's input that the stage received; for its first layer, all of `own_input`.

        Args:
            sizes: The attribute `unkept` or `all` of this object.
            own_input: Input of each of `layers`, in bytes.
        """
        return np.where(self._is_first, own_input, _one_layer_later(sizes))

    def gradients(self, ends: IntArray) -> FloatArray:
        """Return the bytes of received gradients that are still unchanged when the backward of a layer runs.

        A stage receives the gradient of each output tensor. The layer that created the tensor uses up the gradient. A
        layer that reads the tensor adds to the gradient.

        Args:
            ends: Last layers of the stages: consecutive and ascending.

        Returns:
            Shape (layers, ends): layer whose backward runs, last layer of the stage. It may be (1, 1) for zeros.
        """
        return _spanning(*self._relays, self._layers, ends)

    def highest_backward(self, tops: FloatArray, end_twice: FloatArray, backward: Backward | None = None) -> FloatArray:
        """Return the highest memory of a stage's backward, over all layers of the stage; shape (firsts, layers).

        The stage's output and its gradient are not included, because the stage stores them once.

        Args:
            tops: Highest memory of the backward of each of `layers`.
            end_twice: Bytes of `tops` that would count twice if a stage ends with the layer (`LayerMemory.end_twice`).
            backward: Backward of the first or of a later micro-batch, to include waiting gradients of shared
                parameters; None to leave these gradients out.
        """
        inside = self._is_first | self._after_first
        blocks = range(0, len(self._layers), _BLOCK)
        before_end = np.concatenate(
            [self._highest_before_last_layer(tops, slice(n, n + _BLOCK), backward) for n in blocks], axis=1
        )
        at_end = tops - end_twice - self.kept + self._waiting_at_end(backward)
        highest = np.maximum(before_end, at_end) - self.all
        return np.where(inside, highest, 0.0)

    def highest_weight_backward(self, tops: FloatArray, backward: Backward) -> FloatArray:
        """Return the highest memory of a stage's weight-gradient pass (W), over all layers of the stage.

        W sends no tensors. Gradients of shared parameters wait until all layers that use the parameter have run W.

        Args:
            tops: Highest memory of W of each of `layers`.
            backward: W of the first or of a later micro-batch.
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
        found = np.zeros((len(self._firsts), len(self._layers)))
        if backward != "later" or not self._costs.ties:
            return found
        for n in range(0, len(self._layers), _BLOCK):
            ends = self._layers[n : n + _BLOCK]
            for waiting in waiting_rows(self._costs, backward, self._firsts, layers=ends, ends=ends):
                found[waiting.rows, n : n + _BLOCK] = np.diag(waiting.bytes)
        return found

    def _highest_before_last_layer(self, tops: FloatArray, block: slice, backward: Backward | None) -> FloatArray:
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


class NoRelayedTensors:
    """Replacement for `RelayedTensors` in chains that are simple (`is_simple`), where no stage relays tensors.

    Args:
        first: First layers, shape (rows, 1).
        last: Last layers, ascending in each row; shape (rows, columns) or (1, columns).
    """

    def __init__(self, first: IntArray, last: IntArray) -> None:
        self._is_first, self._inside = last == first, last >= first
        self.unkept = self.all = np.zeros((1, 1))

    def received_input(self, _sizes: FloatArray, own_input: FloatArray) -> FloatArray:
        """Return the bytes of each layer's input that the stage received: `own_input` for its first layer, else 0."""
        return np.where(self._is_first, own_input, 0.0)

    def highest_backward(
        self, tops: FloatArray, end_twice: FloatArray, _backward: Backward | None = None
    ) -> FloatArray:
        """Return the highest memory of a stage's backward; see `RelayedTensors.highest_backward`.

        Args:
            tops: Highest memory during the backward of each layer, in bytes.
            end_twice: Part of it that counts twice if the layer is the last of its stage.
            _backward: First or later backward; makes no difference here.
        """
        highest = np.maximum.accumulate(np.where(self._inside, tops, -np.inf), axis=1)
        before_end = np.concatenate([np.full((len(highest), 1), -np.inf), highest[:, :-1]], axis=1)
        return np.where(self._inside, np.maximum(before_end, tops - end_twice), 0.0)


def is_simple(costs: ChainCosts) -> bool:
    """Return True if no tensor bypasses a layer, as skip connections do, and no layers share parameters."""
    storages = costs.storages
    kept = storages.kept_by_readers + storages.kept_by_maker + storages.kept_by_nobody
    return not (costs.ties or costs.relays.bytes.any() or kept[storages.until > storages.maker + 1].any())


def _spanning(begins: IntArray, ends: IntArray, sizes: FloatArray, firsts: IntArray, layers: IntArray) -> FloatArray:
    """Return the total size of the spans that contain a stage, for each first and last layer of the stage.

    A span covers the layers begins[i] to ends[i]. The shape is (firsts, layers), or (1, 1) if there are no spans.
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


def _bypassing_bytes(costs: ChainCosts) -> FloatArray:
    sizes, begins = np.rint(costs.storages.kept_by_readers), costs.storages.maker + 1
    change = np.zeros(costs.num_layers + 2)
    np.add.at(change, begins, sizes)
    np.add.at(change, np.maximum(costs.storages.until, begins), -sizes)
    passed: FloatArray = np.cumsum(change)[: costs.num_layers]
    return passed


def _one_layer_later(values: FloatArray) -> FloatArray:
    if values.shape[1] == 1:
        return values  # at most one layer, which has no previous layer
    return np.concatenate([np.zeros((len(values), 1)), values[:, :-1]], axis=1)
