"""Memory of tensors that a stage receives and sends on unchanged, such as those of skip connections.

A skip connection crosses every boundary between the layer that creates it and the last layer that reads it. On a stage
between these layers, the tensor is input and output at the same time, in one storage. Its gradient is also input and
output in one storage, unless a layer of the stage reads the tensor and adds to the gradient.
"""

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.waiting import Backward, waiting_gradients

_BLOCK = 512
"""Largest number of columns (last layers of stages) for which backward peaks are computed at once."""


class RelayedTensors:
    """Sizes of the tensors that a stage receives and sends on unchanged, in bytes.

    Arrays have one row per first layer and one column per last layer of a stage. If a stage copies its input, it sends
    the copy, and the received tensor does not count.

    Args:
        costs: Costs of the layers.
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
        by_readers = spans(costs.storages.saved_by_readers)
        self.unkept = spans(costs.storages.unsaved) * received
        """Bytes of tensors that the stage receives and sends on, and that no layer of the chain saves."""
        self.all = self.unkept + (by_readers + spans(costs.storages.saved_by_maker)) * received
        """Bytes of all tensors that the stage receives and sends on."""
        self._relays = costs.relays.first - 1, costs.relays.last, np.rint(costs.relays.bytes)
        self._costs, self._firsts, self._layers = costs, firsts, layers
        self.kept = _bypassing_bytes(costs)[layers] - by_readers
        """Bytes of tensors that the stage sends, created by any of its layers but the last one.

        A tensor counts only if a layer that receives it, of any stage, saves it for backward.
        """

    def received_input_bytes(self, sizes: FloatArray, all_input: FloatArray) -> FloatArray:
        """Return how many bytes of each layer's input the layer's stage received from the previous stage.

        The result has one row per first layer of a stage and one column per layer.

        Args:
            sizes: Bytes of relayed tensors: `self.all`, or `self.unkept` to count only tensors that no layer saves.
            all_input: Bytes of each layer's whole input.
        """
        return np.where(self._is_first, all_input, _one_layer_later(sizes))

    def passed_gradients(self, ends: IntArray) -> FloatArray:
        """Return, for each layer, the bytes of received gradients that later layers of the stage pass back unchanged.

        `ends` are the stages' last layers, consecutive and ascending. Shape (layers, ends); (1, 1) if all bytes are 0.
        """
        return _spanning(*self._relays, self._layers, ends)

    def peak_backward(
        self, peaks: FloatArray, output_bytes: FloatArray, backward: Backward | None = None
    ) -> FloatArray:
        """Return the peak memory of each stage's backward, without the stage's output and the output's gradient.

        Args:
            peaks: Peak memory of each layer's backward.
            output_bytes: Bytes of each layer's output and of the output's gradient, which `peaks` includes.
            backward: Micro-batch, `first` or `later`, for which waiting gradients are added. These are gradients of
                shared parameters that wait for the backward of an earlier layer (`WaitingGradients`). In the first
                micro-batch, no earlier gradients exist, so the bytes differ. None to add none.
        """
        inside = self._is_first | self._after_first
        blocks = range(0, len(self._layers), _BLOCK)
        before_end = np.concatenate(
            [self._peak_before_last_layer(peaks, slice(n, n + _BLOCK), backward) for n in blocks], axis=1
        )
        at_end = peaks - output_bytes - self.kept + self._waiting_at_end(backward)
        highest = np.maximum(before_end, at_end) - self.all
        return np.where(inside, highest, 0.0)

    def peak_weight_backward(self, peaks: FloatArray, backward: Backward) -> FloatArray:
        """Return the peak memory of each stage's weight-gradient pass. `peaks` has the peak of each layer's pass."""
        # Gradients of a shared parameter wait until all layers that use the parameter have run W.
        running = np.maximum.accumulate(np.where(self._is_first | self._after_first, peaks, 0.0), axis=1)
        if not self._costs.ties:
            return running
        for n in range(0, len(self._layers), _BLOCK):
            ends = self._layers[n : n + _BLOCK]
            levels = np.where(self._layers[:, None] <= ends, peaks[:, None], -np.inf)
            for waiting in waiting_gradients(
                self._costs, backward, self._firsts, layers=self._layers, ends=ends, converts=False
            ):
                rows = np.maximum(self._highest_from(levels + waiting.bytes), 0.0)
                running[waiting.rows, n : n + _BLOCK] = rows[waiting.rows]
        return running

    def _waiting_at_end(self, backward: Backward | None) -> FloatArray:
        waiting_bytes = np.zeros((len(self._firsts), len(self._layers)))
        if backward is None or not self._costs.ties:
            return waiting_bytes
        for n in range(0, len(self._layers), _BLOCK):
            ends = self._layers[n : n + _BLOCK]
            for waiting in waiting_gradients(self._costs, backward, self._firsts, layers=ends, ends=ends):
                waiting_bytes[waiting.rows, n : n + _BLOCK] = np.diag(waiting.bytes)
        return waiting_bytes

    def _peak_before_last_layer(self, peaks: FloatArray, block: slice, backward: Backward | None) -> FloatArray:
        ends = self._layers[block]
        levels = np.where(self._layers[:, None] < ends, peaks[:, None] - self.passed_gradients(ends), -np.inf)
        rows = self._highest_from(levels)
        if backward is not None:
            for waiting in waiting_gradients(self._costs, backward, self._firsts, layers=self._layers, ends=ends):
                rows[waiting.rows] = self._highest_from(levels + waiting.bytes)[waiting.rows]
        return rows

    def _highest_from(self, levels: FloatArray) -> FloatArray:
        from_here = np.maximum.accumulate(levels[::-1], axis=0)[::-1]
        rows: FloatArray = from_here[self._firsts - self._layers[0]]
        return rows


class NoRelayedTensors:
    """Replacement of `RelayedTensors` for chains without skip connections and shared parameters.

    Args:
        first: First layers of stages, shape (rows, 1).
        last: Last layers of stages, ascending in each row; shape (rows, columns) or (1, columns).
    """

    def __init__(self, first: IntArray, last: IntArray) -> None:
        self._is_first, self._inside = last == first, last >= first
        self.unkept = self.all = np.zeros((1, 1))

    def received_input_bytes(self, _sizes: FloatArray, all_input: FloatArray) -> FloatArray:
        return np.where(self._is_first, all_input, 0.0)  # only a stage's first layer has input from earlier stages

    def peak_backward(
        self, peaks: FloatArray, output_bytes: FloatArray, _backward: Backward | None = None
    ) -> FloatArray:
        """Return the peak memory of each stage's backward; see `RelayedTensors.peak_backward`.

        Args:
            peaks: Peak memory of each layer's backward, in bytes.
            output_bytes: Bytes of each layer's output and of the output's gradient, which `peaks` includes.
            _backward: Ignored.
        """
        highest = np.maximum.accumulate(np.where(self._inside, peaks, -np.inf), axis=1)
        before_end = np.concatenate([np.full((len(highest), 1), -np.inf), highest[:, :-1]], axis=1)
        return np.where(self._inside, np.maximum(before_end, peaks - output_bytes), 0.0)


def has_no_skips_or_ties(costs: ChainCosts) -> bool:
    """Return True if the chain has no skip connections, and no layers that share parameters."""
    storages = costs.storages
    kept = storages.saved_by_readers + storages.saved_by_maker + storages.unsaved
    return not (costs.ties or costs.relays.bytes.any() or kept[storages.until > storages.maker + 1].any())


def _spanning(begins: IntArray, ends: IntArray, sizes: FloatArray, firsts: IntArray, layers: IntArray) -> FloatArray:
    # Span i covers the layers begins[i] to ends[i] and has sizes[i]. Return the total size of all spans that contain a
    # stage, for each first and last layer of the stage.
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
    sizes, begins = np.rint(costs.storages.saved_by_readers), costs.storages.maker + 1
    change = np.zeros(costs.num_layers + 2)
    np.add.at(change, begins, sizes)
    np.add.at(change, np.maximum(costs.storages.until, begins), -sizes)
    passed: FloatArray = np.cumsum(change)[: costs.num_layers]
    return passed


def _one_layer_later(values: FloatArray) -> FloatArray:
    if values.shape[1] == 1:
        return values  # at most one layer, which has no previous layer
    return np.concatenate([np.zeros((len(values), 1)), values[:, :-1]], axis=1)
