"""Memory of a stage that recomputes some of its layers, each layer separately.

For every micro-batch in flight, a recomputed layer saves its input and a copy of the state that its forward changes.
Other tensors that its backward needs exist only while this backward runs. The computation goes through the layers of a
stage in order, with

    held       bytes that one micro-batch has saved in the layers so far
    pending    storages in the layer's input that no earlier layer has saved; a recomputed layer saves all of its input

The bytes of a layer are

    f          peak of its forward
    n          peak of its forward without gradients
    g          gradient of its output
    b          peak of its backward, including g
    c          copy of its input, if the layer writes into its input
    w          copy of the state that its forward changes

If each layer has a `MemoryDetail`:

                      not recomputed                           recomputed
    forward           held + pending + f                       held + pending + c + w + n
    backward          held + b                                 held + pending + c + max(w + g + f, b)
    added to held     its own saved tensors, and the part of   pending, c, w, and the part of its output
                      its output that this layer or a later    that a later layer saves
                      layer saves

A recomputed layer repeats its forward (w + g + f) before its backward (b). If a layer is not recomputed, its pending
storages are freed before its backward.

Without `MemoryDetail`, each peak is temporary memory on top of all saved memory. If a layer is recomputed, its peak
also includes its saved bytes or its output, whichever is larger.

Sizes are rounded to whole bytes before they are added, so that sums do not depend on the order of addition.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts, prefix_sums, suffix_sums
from planner.core.cost.passing import RelayedTensors
from planner.core.cost.waiting import Backward, shared_cast_bytes, waiting_gradients_in_stage

KEEP, RECOMPUTE = 0, 1
"""Indices of the two decisions for a layer: keep its saved tensors, or recompute them."""


FORWARD, FIRST_BACKWARD, BACKWARD = 0, 1, 2
"""Indices of the fields of `LayerPeaks`."""


class LayerPeaks(NamedTuple):
    """Peak memory of each layer in whole bytes, without the bytes that earlier layers have saved."""

    forward: FloatArray
    first_backward: FloatArray
    """Peak in the backward of the step's first micro-batch, which allocates the gradients."""
    backward: FloatArray
    """Peak in the backward of any micro-batch except the first."""


class PendingStorage(NamedTuple):
    """Storage for later layers: the last layer that reads it, and the bytes that the creating layer does not save.

    If the creating layer does not save the storage, the first recomputed layer with this storage in its input saves it.
    The reason is that a recomputed layer saves its whole input, to repeat its forward.
    """

    until: int
    """Index of the last layer that reads the storage."""
    bytes: tuple[float, float]
    """Bytes that the creating layer does not save: entry 0 if it is not recomputed, entry 1 if it is recomputed."""


Bytes = TypeVar("Bytes", float, FloatArray)
"""Bytes of one stage, or an array for several stages or choices of recomputed layers."""


class SavedAndPeaks(NamedTuple, Generic[Bytes]):
    """Bytes that one micro-batch saves in a stage, and the stage's peak memory in forward and backward."""

    saved: Bytes
    forward: Bytes
    first_backward: Bytes
    """Peak memory of the backward of the step's first micro-batch, which allocates the gradients."""
    backward: Bytes
    """Peak memory of the backward of any micro-batch except the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayerMemory:
    """Memory of each layer of one stage, with and without recomputation of the layer, in whole bytes."""

    first: int
    end: int
    stacked: bool
    """True if a layer's peak adds to the saved bytes of earlier layers; False if it adds to those of all layers."""
    peaks: LayerPeaks
    """Arrays of shape (2, end - first). Row 0: the layer is not recomputed; row 1: it is recomputed."""
    held: FloatArray
    """Bytes that each layer saves without and with recomputation, except `pending`; shape (2, end - first)."""
    pending: tuple[tuple[PendingStorage, ...], ...]
    """Storages that each layer creates for later layers."""
    can_recompute: BoolArray
    """True for layers that can be recomputed: those with a backward; shape (end - first,)."""
    passed: FloatArray
    """Bytes of received tensors to count in each layer's forward, in addition to the stage's input and its copy.

    Entry i > 0 is for layer `first + i`. It counts tensors that no layer saves and that this or a later layer receives.
    Entry 0 is 0. Shape (end - first + 1,); the last entry counts tensors that leave the stage. All entries are 0 if the
    stage does not copy its input.
    """

    @classmethod
    def of(cls, costs: ChainCosts, first: int, end: int) -> "StageLayerMemory":
        """Return the memory of the layers of a stage.

        Args:
            costs: Costs of the layers at the micro-batch size.
            first: First layer of the stage.
            end: One past its last layer.

        Complexity: O(number of layers of the chain).
        """
        made, stage = costs.storages.maker, slice(first, end)
        by_maker, unkept = np.rint(costs.storages.saved_by_maker), np.rint(costs.storages.unsaved)
        copied = np.rint(costs.boundaries.copied_input[stage])
        # If the first layer is not recomputed, the stage copies its input for it.
        own_copy = np.where(np.arange(first, end) == first, copied, 0.0)
        dropped = _sum_by_maker(costs, costs.storages.saved_by_readers)
        kept = dropped + most_bytes_freed(costs)[0]
        pending: list[list[PendingStorage]] = [[] for _ in range(first, end)]
        for n in np.flatnonzero((made >= first) & (made < end) & (by_maker + unkept > 0)):
            sizes = (float(unkept[n]), float(by_maker[n] + unkept[n]))
            pending[made[n] - first].append(PendingStorage(int(costs.storages.until[n]), sizes))
        return cls(
            first=first,
            end=end,
            stacked=costs.exact,
            peaks=_peaks(costs, first, end, copied, own_copy) if costs.exact else _transients(costs, stage),
            held=np.stack([own_copy + kept[stage], copied + dropped[stage] + np.rint(costs.state.rewritten[stage])]),
            pending=tuple(map(tuple, pending)),
            can_recompute=costs.has_backward[stage],
            passed=_passed(costs, unkept, first, end) * (copied[0] > 0),  # 0 if the stage does not copy its input
        )

    def saved_and_peaks(self, recomputed: Collection[int]) -> SavedAndPeaks[float]:
        """Return the stage's saved bytes and peaks if it recomputes the layers `recomputed` (indices in the chain)."""
        is_recomputed = np.zeros((1, self.end - self.first), dtype=np.bool_)
        is_recomputed[0, [n - self.first for n in recomputed]] = True
        return SavedAndPeaks(*(float(each[0]) for each in self.saved_and_peaks_by_choice(is_recomputed)))

    def saved_and_peaks_by_choice(self, recomputed: BoolArray) -> SavedAndPeaks[FloatArray]:
        """Return the stage's saved bytes and peaks for each of several choices of recomputed layers.

        `recomputed` is true for recomputed layers, shape (choices, layers). It is ignored for layers without a
        backward. Complexity: O(choices * layers).
        """
        num = len(recomputed)
        held, highest = np.zeros(num), [np.zeros(num)] * len(LayerPeaks._fields)
        pending: list[tuple[int, FloatArray]] = []
        for n in range(self.end - self.first):
            is_recomputed = recomputed[:, n] & self.can_recompute[n]
            waiting = np.sum([size for _, size in pending], axis=0) if pending else np.zeros(num)
            taken = np.where(is_recomputed, waiting, 0.0)
            bases = (held + waiting + self.passed[n], held + taken, held + taken)
            peaks = (np.where(is_recomputed, rows[RECOMPUTE, n], rows[KEEP, n]) for rows in self.peaks)
            tops = [base * self.stacked + peak for base, peak in zip(bases, peaks, strict=True)]
            highest = [np.maximum(*pair) for pair in zip(highest, tops, strict=True)]
            held = held + np.where(is_recomputed, self.held[RECOMPUTE, n], self.held[KEEP, n]) + taken
            pending = [
                *((until, np.where(is_recomputed, 0.0, size)) for until, size in pending if until > self.first + n),
                *(
                    (made.until, np.where(is_recomputed, made.bytes[RECOMPUTE], made.bytes[KEEP]))
                    for made in self.pending[n]
                ),
            ]
        # The engine stores the output of the last layer.
        leaving = np.sum([size for _, size in pending], axis=0) if pending else np.zeros(num)
        return SavedAndPeaks(held + leaving + self.passed[-1], *highest)


def most_bytes_freed(costs: ChainCosts) -> tuple[FloatArray, FloatArray]:
    """Return the most bytes per micro-batch that recomputing a layer frees: if it begins a stage, and if it does not.

    Returns:
        One array for layers that begin a stage, whose input is stored in any case. One array for other layers, whose
        recomputation must also store their input.
    """
    dropped = np.rint(costs.memory.internal) + _sum_by_maker(costs, costs.storages.saved_by_maker)
    # Only storages with one reader count, because another reader may save a storage already.
    own = (costs.storages.maker >= 0) & (costs.storages.until == costs.storages.maker + 1)
    sizes = np.where(own, np.rint(costs.storages.unsaved), 0.0)
    kept = np.bincount(costs.storages.until[own], sizes[own], minlength=costs.num_layers + 1)[:-1]
    return dropped, np.maximum(dropped - kept, 0.0)


def saved_and_peaks_without_recomputation(
    costs: ChainCosts, firsts: IntArray, span: slice
) -> tuple[FloatArray, LayerPeaks]:
    """Return the saved bytes and peaks of stages that recompute no layer.

    Args:
        costs: Costs of the layers at the plan's micro-batch size.
        firsts: First layers of the stages, ascending.
        span: Last layers of the stages.

    Returns:
        Saved bytes, and peaks: arrays with one row per first layer and one column per last layer. Entries whose last
        layer is before the first layer are meaningless.
    """
    # Callers subtract `most_bytes_freed` to get lower bounds for stages that recompute layers.
    kept = most_bytes_freed(costs)[0] + _sum_by_maker(costs, costs.storages.saved_by_readers)
    unkept, into = np.rint(costs.storages.unsaved), np.zeros(costs.num_layers + 2)
    np.add.at(into, costs.storages.maker + 1, unkept)
    np.add.at(into, costs.storages.until + 1, -unkept)
    into = np.cumsum(into)
    layers = np.arange(costs.num_layers)[span]
    passing = RelayedTensors(costs, firsts, layers)
    copied = np.rint(costs.boundaries.copied_input)
    first, layer = firsts[:, None], layers[None, :]
    before = prefix_sums(kept)
    saved_before = before[layer] - before[first] + copied[first]
    saved = saved_before + kept[layer] + into[layer + 1] - passing.unkept

    def highest(peaks: FloatArray) -> FloatArray:
        running: FloatArray = np.maximum.accumulate(np.where(layer >= first, peaks, -np.inf), axis=1)
        return running

    (forward, first_backward, backward), no_grad = _peaks_with_and_without_grad(costs)
    if not costs.exact:
        transient = highest(np.broadcast_to(backward[layer], saved.shape))
        return saved, LayerPeaks(transient, transient, transient)
    received = passing.received_input_bytes(passing.unkept, into[layers])
    # Callers need a lower bound, for forwards with and without gradients.
    forward = np.minimum(forward, no_grad)[layer] + into[layer] - received
    output, through = np.rint(costs.boundaries.output)[layer], np.cumsum(np.rint(costs.gradients))
    casts = prefix_sums(np.rint(costs.state.casts))
    casts_through = casts[layer + 1]
    at_end = copied[first] + highest(np.rint(cast_gradient_peaks(costs))[layer]) + casts_through - casts[first]
    at_end = at_end - shared_cast_bytes(costs, first, layer)
    at_end = np.where(casts_through > casts[first], at_end, 0.0)

    def peak_backward(
        peaks: FloatArray, later_bytes: FloatArray, output_bytes: FloatArray, backward: Backward
    ) -> FloatArray:
        tops = before[layers] + (peaks - later_bytes)[layers]
        highest = passing.peak_backward(tops, np.rint(output_bytes)[layers], backward)
        return highest + later_bytes[layer] + copied[first] - before[first]

    return saved, LayerPeaks(
        highest(saved_before + forward),
        peak_backward(first_backward, through, costs.memory.output_in_first_backward, "first") + output,
        np.maximum(peak_backward(backward, casts[1:], costs.memory.output_in_backward, "later"), at_end - passing.all)
        + output,
    )


def _peaks(costs: ChainCosts, first: int, end: int, copied: FloatArray, own_copy: FloatArray) -> LayerPeaks:
    stage, passing = slice(first, end), RelayedTensors(costs, np.array([first]), np.arange(first, end))
    # Gradients of relayed tensors are in the engine's buffers. They are not in the peaks of the last layer.
    gone_by = float(passing.all[0, -1])
    counted_twice = np.zeros((2, end - first)) + passing.passed_gradients(np.array([end - 1]))[:, 0]
    counted_twice[:, -1] = float(passing.kept[0, -1]), 0.0
    all_kept, all_no_grad = _peaks_with_and_without_grad(costs)
    forward, first_backward, backward = (peak[stage] for peak in all_kept)
    rewritten = np.rint(costs.state.rewritten[stage])
    output, gradients = np.rint(costs.boundaries.output[stage]), np.rint(costs.gradients[stage])
    casts = np.rint(costs.state.casts[stage])
    # The gradient of the stage's own output is counted with the engine's transfers.
    recomputing = np.append(np.rint(costs.boundaries.output_gradient[first : end - 1]), 0.0) + forward + rewritten
    own_output = output[-1] - gone_by
    later = np.stack([own_copy + backward, copied + np.maximum(recomputing, backward)]) + suffix_sums(casts)
    later += waiting_gradients_in_stage(costs, "later", first, end)
    later += own_output - counted_twice
    later[KEEP, -1] -= np.rint(costs.memory.output_in_backward[end - 1])
    sooner = np.stack([own_copy + first_backward, copied + np.maximum(recomputing, first_backward)])
    sooner += suffix_sums(gradients)
    sooner += own_output - counted_twice + waiting_gradients_in_stage(costs, "first", first, end)
    sooner[KEEP, -1] -= np.rint(costs.memory.output_in_first_backward[end - 1])
    if casts.any():
        # At the end of the backward, the stage holds nothing except a copy of its input.
        of_copies = casts.sum() - shared_cast_bytes(costs, np.array(first), np.array(end - 1))[0, 0]
        at_end = copied[0] + np.rint(cast_gradient_peaks(costs)[stage]).max() + of_copies + own_output
        later[:, 0] = np.maximum(later[:, 0], at_end)
    return LayerPeaks(
        np.stack([own_copy + forward, copied + all_no_grad[stage] + rewritten]),
        sooner,
        later,
    )


def cast_gradient_peaks(costs: ChainCosts) -> FloatArray:
    """Return the bytes that each layer needs at most to convert the gradients of its autocast weight copies.

    The bytes of these gradients themselves are not included. Shape (layers,).
    """
    return np.maximum(_peaks_with_and_without_grad(costs)[0].backward - costs.state.casts, 0.0)


def recomputed_backward_peaks(costs: ChainCosts) -> tuple[FloatArray, FloatArray]:
    """Return the first-backward peak of each layer if recomputed under autocast, and running sums of gradient bytes.

    Returns:
        Two arrays of shape (layers,), in bytes. The first has the peak of each layer. It includes the saved bytes of
        all earlier layers of the chain and the gradients of all later layers. The second is a running sum: entry i is
        the gradient bytes of the layers 0 to i.
    """
    # Gradients of autocast's weight copies exist until the stage's backward ends.
    uncopied = np.maximum(costs.gradients - 2 * costs.state.casts, 0.0)
    level = costs.memory.backward - np.cumsum(uncopied) + uncopied + uncopied.sum()
    return level, np.cumsum(costs.state.casts + uncopied)


def _transients(costs: ChainCosts, stage: slice) -> LayerPeaks:
    kept = _peaks_with_and_without_grad(costs)[0].backward[stage]
    rows = np.stack([kept, kept + np.rint(np.maximum(costs.memory.saved, costs.boundaries.output))[stage]])
    return LayerPeaks(rows, rows, rows)


def _peaks_with_and_without_grad(costs: ChainCosts) -> tuple[LayerPeaks, FloatArray]:
    if not costs.exact:
        transient = np.rint(np.maximum(costs.memory.forward, costs.memory.backward))
        return LayerPeaks(transient, transient, transient), transient
    held = prefix_sums(costs.memory.saved)[:-1]
    gradients, casts = prefix_sums(costs.gradients), prefix_sums(costs.state.casts)
    peaks = (
        costs.memory.forward - held - costs.boundaries.unsaved_input,
        costs.memory.first_backward - held + gradients[1:] - gradients[-1],
        costs.memory.backward - held + casts[1:] - casts[-1],
        costs.memory.no_grad - costs.boundaries.input_alive,
    )
    # Interpolation raises negative values to 0, one by one, so that differences may be negative.
    forward, first_backward, backward, no_grad = (np.rint(np.maximum(peak, 0.0)) for peak in peaks)
    return LayerPeaks(forward, first_backward, backward), no_grad


def _sum_by_maker(costs: ChainCosts, sizes: FloatArray) -> FloatArray:
    made = costs.storages.maker >= 0
    total = np.bincount(costs.storages.maker[made], np.rint(sizes[made]), minlength=costs.num_layers)
    return total.astype(np.float64)


def _passed(costs: ChainCosts, unkept: FloatArray, first: int, end: int) -> FloatArray:
    layers = np.arange(first, end + 1)[:, None]
    passes = (costs.storages.maker < first) & (costs.storages.until >= layers)
    passed: FloatArray = np.where(passes, unkept, 0.0).sum(axis=1)
    # The first layer's input is the stage's received input, which is counted separately.
    passed[0] = 0.0
    return passed
