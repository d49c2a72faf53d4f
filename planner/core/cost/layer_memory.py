"""Compute the memory of a stage that recomputes some of its layers, each on its own.

A recomputed layer saves its input for every micro-batch in flight, and drops everything else that it would save. That
exists again only while its own backward runs. The computation goes through the layers of a stage in order, with

    held       bytes that one micro-batch has saved in the layers so far
    pending    storages that the next layers read and that no layer has saved so far; they are saved if one of the
               layers that read them is recomputed, else they are freed after the last of these

Each layer adds its own peak and then its saved bytes. With exact records (g: gradient of the layer's output; c: copy
of its input, made if the layer would write into it; w: copy of the state that its forward changes):

                      not recomputed                           recomputed
    forward           held + pending + forward peak            held + pending + c + w + peak without gradients
    backward          held + backward peak                     held + pending + c + max(w + g + forward peak,
                                                                                        backward peak)
    added to held     internal bytes, and of its output what   pending, c, w, and of its output what a later
                      it or a later layer saves                layer saves

Without exact records, each peak is a transient above all saved memory. A recomputed layer's transient also includes its
saved bytes, or its output if that is larger. Its saved bytes are assumed to include as much of its output as possible.

Sizes are rounded to whole bytes before they are added, so sums do not depend on their order.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, sums_before
from planner.core.cost.passing import RelayedTensors
from planner.core.cost.waiting import Backward, waiting_in

FloatArray = NDArray[np.float64]

KEEP, RECOMPUTE = 0, 1
"""First index of many arrays, the decision for a layer: keep its saved tensors, or recompute them."""


FORWARD, FIRST_BACKWARD, BACKWARD = 0, 1, 2
"""Positions in `LayerPeaks`."""


class LayerPeaks(NamedTuple):
    """Peaks of single layers in whole bytes; the last axis is the layer.

    With exact records, peaks are relative to the memory that earlier layers have saved, and those of the first backward
    include the gradients of the layer's parameters. Without them, all three are the same transient.
    """

    forward: FloatArray
    first_backward: FloatArray
    backward: FloatArray


class Pending(NamedTuple):
    """Storage that a layer creates and that no later layer saves unless it is recomputed."""

    until: int
    """Index of the last layer that reads it."""
    bytes: tuple[float, float]
    """Bytes of the storage that its creating layer does not save. Entry 0: that layer is not recomputed; entry 1: it
    is."""


class StageLevels(NamedTuple):
    """Saved bytes and peaks of a stage that recomputes some of its layers."""

    saved: float
    forward: float
    first_backward: float
    backward: float
    """Peak of a later backward. Without exact records, all three peaks are the transient."""


class ManyLevels(NamedTuple):
    """`StageLevels` of N choices of recomputed layers, as arrays of shape (N,)."""

    saved: FloatArray
    forward: FloatArray
    first_backward: FloatArray
    backward: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Data of the layers `first`..`end - 1` for computing the memory of their stage; one entry per layer, whole bytes.

    If `stacked`, peaks are on top of what earlier layers have saved; otherwise on top of everything saved. Peaks of
    backwards include the stage's output, which the engine stores. Those of the first backward include gradients of
    later layers.
    """

    first: int
    end: int
    stacked: bool
    peaks: LayerPeaks
    """Arrays of shape (2, end - first), by decision and layer."""
    held: FloatArray
    """Bytes that each layer saves, without pending storages; shape (2, end - first)."""
    pending: tuple[tuple[Pending, ...], ...]
    """For each layer of the stage, the storages that it creates and that no later layer saves."""
    can_recompute: NDArray[np.bool_]
    """True for layers that can be recomputed: those with a backward; shape (end - first,)."""
    passed: FloatArray
    """Bytes of the stage's copy of its input that each layer reads and the stage sends on; shape (end - first + 1,)."""

    @classmethod
    def of(cls, costs: ChainCosts, first: int, end: int) -> "StageLayers":
        """Return the data of a stage's layers.

        Args:
            costs: Costs of the chain at the micro-batch size.
            first: First layer of the stage.
            end: One past its last layer.

        Complexity: O(L).
        """
        made, stage = costs.storages.maker, slice(first, end)
        by_maker, unkept = np.rint(costs.storages.kept_by_maker), np.rint(costs.storages.kept_by_nobody)
        copied = np.rint(costs.boundaries.copied_input[stage])
        # A first layer that is not recomputed works on a copy that the stage makes.
        own_copy = np.where(np.arange(first, end) == first, copied, 0.0)
        dropped = _per_layer(costs, costs.storages.kept_by_readers)
        kept = dropped + most_savings(costs)[0]
        pending: list[list[Pending]] = [[] for _ in range(first, end)]
        for n in np.flatnonzero((made >= first) & (made < end) & (by_maker + unkept > 0)):
            sizes = (float(unkept[n]), float(by_maker[n] + unkept[n]))
            pending[made[n] - first].append(Pending(int(costs.storages.until[n]), sizes))
        return cls(
            first=first,
            end=end,
            stacked=costs.exact,
            peaks=_peaks(costs, first, end, copied, own_copy) if costs.exact else _transients(costs, stage),
            held=np.stack([own_copy + kept[stage], copied + dropped[stage] + np.rint(costs.state.rewritten[stage])]),
            pending=tuple(map(tuple, pending)),
            can_recompute=costs.has_backward[stage],
            passed=_passed(costs, unkept, first, end) * (copied[0] > 0),
        )

    def levels(self, recomputed: Collection[int]) -> StageLevels:
        """Return the stage's memory if the layers `recomputed` (indices in the chain) are recomputed.

        Complexity: O(end - first).
        """
        is_recomputed = np.zeros((1, self.end - self.first), dtype=np.bool_)
        is_recomputed[0, [n - self.first for n in recomputed]] = True
        return StageLevels(*(float(each[0]) for each in self.many_levels(is_recomputed)))

    def many_levels(self, recomputed: NDArray[np.bool_]) -> ManyLevels:
        """Return the stage's memory for N choices of recomputed layers at once.

        Args:
            recomputed: True for recomputed layers, shape (N, end - first); ignored for layers without a backward.

        Complexity: O(N (end - first)).
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
        # The engine holds the output of the last layer.
        leaving = np.sum([size for _, size in pending], axis=0) if pending else np.zeros(num)
        return ManyLevels(held + leaving + self.passed[-1], *highest)


def most_savings(costs: ChainCosts) -> tuple[FloatArray, FloatArray]:
    """Return, for every layer, an upper bound on the bytes that recomputing it saves per micro-batch.

    Returns:
        Two arrays of shape (L,). The first is for a layer at the start of its stage, whose input the stage stores
        anyway.
        The second is for other layers, which then save the part of their input that no other layer saves.
    """
    dropped = np.rint(costs.levels.internal) + _per_layer(costs, costs.storages.kept_by_maker)
    # If a storage also goes to other layers, one of these may keep it already, so only storages with one reader count.
    own = (costs.storages.maker >= 0) & (costs.storages.until == costs.storages.maker + 1)
    sizes = np.where(own, np.rint(costs.storages.kept_by_nobody), 0.0)
    kept = np.bincount(costs.storages.until[own], sizes[own], minlength=costs.num_layers + 1)[:-1]
    return dropped, np.maximum(dropped - kept, 0.0)


def least_levels(costs: ChainCosts, firsts: NDArray[np.int64], span: slice) -> tuple[FloatArray, LayerPeaks]:
    """Return memory of stages that becomes a lower bound once `most_savings` of recomputed layers are subtracted.

    Saved bytes are at least the returned bytes minus the `most_savings` of all recomputed layers. A peak is at least
    the returned peak minus the savings of the recomputed layers before the one that reaches it.

    Args:
        costs: Costs of the chain at the plan's micro-batch size.
        firsts: First layers of the stages, ascending.
        span: Last layers of the stages.

    Returns:
        Saved bytes and peaks, arrays of shape (firsts, span). Row a, column e is the stage of layers `firsts[a]`..
        `span.start + e`. Values before a row's own first layer are meaningless.
    """
    kept = most_savings(costs)[0] + _per_layer(costs, costs.storages.kept_by_readers)
    unkept, into = np.rint(costs.storages.kept_by_nobody), np.zeros(costs.num_layers + 2)
    np.add.at(into, costs.storages.maker + 1, unkept)
    np.add.at(into, costs.storages.until + 1, -unkept)
    into = np.cumsum(into)
    layers = np.arange(costs.num_layers)[span]
    passing = RelayedTensors(costs, firsts, layers)
    copied = np.rint(costs.boundaries.copied_input)
    first, layer = firsts[:, None], layers[None, :]
    before = sums_before(kept)
    saved_before = before[layer] - before[first] + copied[first]
    saved = saved_before + kept[layer] + into[layer + 1] - passing.unkept

    def highest(peaks: FloatArray) -> FloatArray:
        running: FloatArray = np.maximum.accumulate(np.where(layer >= first, peaks, -np.inf), axis=1)
        return running

    (forward, first_backward, backward), no_grad = _layer_peaks(costs)
    if not costs.exact:
        transient = highest(np.broadcast_to(backward[layer], saved.shape))
        return saved, LayerPeaks(transient, transient, transient)
    received = passing.received_input(passing.unkept, into[layers])
    forward = np.minimum(forward, no_grad)[layer] + into[layer] - received
    output, through = np.rint(costs.boundaries.output)[layer], np.cumsum(np.rint(costs.gradients))
    casts = sums_before(np.rint(costs.state.casts))
    casts_through = casts[layer + 1]
    at_end = copied[first] + highest(np.rint(cast_gradient_peaks(costs))[layer]) + casts_through - casts[first]
    at_end = np.where(casts_through > casts[first], at_end, 0.0)

    def highest_backward(
        peaks: FloatArray, later_bytes: FloatArray, end_twice: FloatArray, backward: Backward
    ) -> FloatArray:
        tops = before[layers] + (peaks - later_bytes)[layers]
        highest = passing.highest_backward(tops, np.rint(end_twice)[layers], backward)
        return highest + later_bytes[layer] + copied[first] - before[first]

    return saved, LayerPeaks(
        highest(saved_before + forward),
        highest_backward(first_backward, through, costs.levels.end_twice_first, "first") + output,
        np.maximum(highest_backward(backward, casts[1:], costs.levels.end_twice, "later"), at_end - passing.all)
        + output,
    )


def _peaks(costs: ChainCosts, first: int, end: int, copied: FloatArray, own_copy: FloatArray) -> LayerPeaks:
    stage, passing = slice(first, end), RelayedTensors(costs, np.array([first]), np.arange(first, end))
    # The gradient of what passes by is the engine's own; of the last layer's output, it is not among its peaks.
    gone_by = float(passing.all[0, -1])
    counted_twice = np.zeros((2, end - first)) + passing.gradients(np.array([end - 1]))[:, 0]
    counted_twice[:, -1] = float(passing.kept[0, -1]), 0.0
    all_kept, all_no_grad = _layer_peaks(costs)
    forward, first_backward, backward = (peak[stage] for peak in all_kept)
    rewritten = np.rint(costs.state.rewritten[stage])
    output, gradients = np.rint(costs.boundaries.output[stage]), np.rint(costs.gradients[stage])
    later_bytes = gradients.sum() - np.cumsum(gradients)
    casts = np.rint(costs.state.casts[stage])
    later_casts = casts.sum() - np.cumsum(casts)
    # The gradient of the stage's own output is counted with the engine's transfers.
    recomputing = np.append(np.rint(costs.boundaries.output_gradient[first : end - 1]), 0.0) + forward + rewritten
    own_output = output[-1] - gone_by
    later = np.stack([own_copy + backward, copied + np.maximum(recomputing, backward)]) + later_casts
    later += waiting_in(costs, "later", first, end)
    later += own_output - counted_twice
    later[KEEP, -1] -= np.rint(costs.levels.end_twice[end - 1])
    sooner = np.stack([own_copy + first_backward, copied + np.maximum(recomputing, first_backward)]) + later_bytes
    sooner += own_output - counted_twice + waiting_in(costs, "first", first, end)
    sooner[KEEP, -1] -= np.rint(costs.levels.end_twice_first[end - 1])
    if casts.any():
        # At the end of the backward, the stage holds nothing except a copy of its input.
        at_end = copied[0] + np.rint(cast_gradient_peaks(costs)[stage]).max() + casts.sum() + own_output
        later[:, 0] = np.maximum(later[:, 0], at_end)
    return LayerPeaks(
        np.stack([own_copy + forward, copied + all_no_grad[stage] + rewritten]),
        sooner,
        later,
    )


def cast_gradient_peaks(costs: ChainCosts) -> FloatArray:
    """Return the memory for converting gradients of the autocast cache at the end of a backward, in bytes per layer.

    It comes on top of the `casts` bytes of these gradients, for exact records. Autograd first runs what was recorded
    last, and the first micro-batch has recorded the cached copies. So in later backwards all their gradients wait until
    the rest of the stage is done.
    """
    return np.maximum(_layer_peaks(costs)[0].backward - costs.state.casts, 0.0)


def recomputed_levels(costs: ChainCosts) -> tuple[FloatArray, FloatArray]:
    """Return the levels of a recomputed first backward under autocast, and the gradients that accumulate during it.

    Gradients of cached copies wait until the end, and gradients of parameters without a copy exist immediately.

    Returns:
        Two arrays of shape (L,) in bytes. Levels are like `Levels.backward`, and include everything that waits up to
        the
        end of the chain. The second array sums what waits over the layers up to each one.
    """
    uncopied = np.maximum(costs.gradients - 2 * costs.state.casts, 0.0)
    level = costs.levels.backward - np.cumsum(uncopied) + uncopied + uncopied.sum()
    return level, np.cumsum(costs.state.casts + uncopied)


def _transients(costs: ChainCosts, stage: slice) -> LayerPeaks:
    kept = _layer_peaks(costs)[0].backward[stage]
    rows = np.stack([kept, kept + np.rint(np.maximum(costs.levels.saved, costs.boundaries.output))[stage]])
    return LayerPeaks(rows, rows, rows)


def _layer_peaks(costs: ChainCosts) -> tuple[LayerPeaks, FloatArray]:
    """Return the peaks of layers that are not recomputed, and of their forward without gradients; shape (L,)."""
    if not costs.exact:
        transient = np.rint(np.maximum(costs.levels.forward, costs.levels.backward))
        return LayerPeaks(transient, transient, transient), transient
    held = sums_before(costs.levels.saved)[:-1]
    gradients, casts = sums_before(costs.gradients), sums_before(costs.state.casts)
    peaks = (
        costs.levels.forward - held - costs.boundaries.unkept_input,
        costs.levels.first_backward - held + gradients[1:] - gradients[-1],
        costs.levels.backward - held + casts[1:] - casts[-1],
        costs.levels.no_grad - costs.boundaries.input_alive,
    )
    # Interpolation may have cut the levels off at zero, each for itself.
    forward, first_backward, backward, no_grad = (np.rint(np.maximum(peak, 0.0)) for peak in peaks)
    return LayerPeaks(forward, first_backward, backward), no_grad


def _per_layer(costs: ChainCosts, sizes: FloatArray) -> FloatArray:
    """Return the sizes of storages, summed by the layer that creates them; shape (L,)."""
    made = costs.storages.maker >= 0
    total = np.bincount(costs.storages.maker[made], np.rint(sizes[made]), minlength=costs.num_layers)
    return total.astype(np.float64)


def _passed(costs: ChainCosts, unkept: FloatArray, first: int, end: int) -> FloatArray:
    layers = np.arange(first, end + 1)[:, None]
    passes = (costs.storages.maker < first) & (costs.storages.until >= layers)
    passed: FloatArray = np.where(passes, unkept, 0.0).sum(axis=1)
    # The input of the first layer is what the stage received.
    passed[0] = 0.0
    return passed
