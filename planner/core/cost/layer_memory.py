"""What a stage holds when it recomputes some of its layers, each on its own.

A recomputed layer keeps its input for every micro-batch in flight and drops what else it saves, which is there again
only while its own backward runs. Walk through the layers of a stage with

    held       what one micro-batch leaves behind in the layers so far
    pending    storages that go into the next layer and that no layer so far keeps: they stay if one of the layers
               that they are handed to is recomputed, and are gone soon if none is

Each layer puts its own peak on top of that, and leaves something behind. With exact records (g is the gradient of its
output, c a copy of its input, made where that would be written into, w the state that its forward writes, as it was
before):

                      not recomputed                           recomputed
    forward           held + pending + forward peak            held + pending + c + w + peak without gradients
    backward          held + backward peak                     held + pending + c + max(w + g + forward peak,
                                                                                        backward peak)
    leaves behind     internal bytes, and of its output what   pending, c, w, and of its output what a layer
                      it or a layer behind keeps               behind keeps

Without exact records every peak is a transient above all that is held anywhere; a recomputed layer's has what it saves,
or its output if that is more, on top. What a layer saves is taken to hold its output as far as it can.

Sizes are rounded to whole bytes before they are added: then the order of a sum decides nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, sums_before
from planner.core.cost.passing import Passing
from planner.core.cost.waiting import Backward, waiting_in

FloatArray = NDArray[np.float64]

KEPT, AGAIN = 0, 1
"""The two decisions, first index of many arrays: what the layer saves is kept, or computed again."""


FORWARD, FIRST_BACKWARD, BACKWARD = 0, 1, 2
"""Positions in `LayerPeaks`."""


class LayerPeaks(NamedTuple):
    """Peaks of single layers, whole bytes, as arrays whose last axis is the layer.

    Without exact records they are all the same, the transient; with them they are above what is held in front of the
    layer, and those of the first backward contain the gradients of its parameters.
    """

    forward: FloatArray
    first_backward: FloatArray
    backward: FloatArray


class Pending(NamedTuple):
    """A storage that a layer makes and that no layer behind keeps by itself."""

    until: int
    """The last layer that it is handed to."""
    bytes: tuple[float, float]
    """How much of it its maker does not hold, by the maker's decision."""


class StageLevels(NamedTuple):
    """A stage with some layers recomputed, as `planner.core.cost.memory` has it for one without; in bytes."""

    saved: float
    forward: float
    first_backward: float
    backward: float
    """Without exact records the transient, as are the other two."""


class ManyLevels(NamedTuple):
    """`StageLevels` of many stages, in arrays of one shape."""

    saved: FloatArray
    forward: FloatArray
    first_backward: FloatArray
    backward: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """The layers `first`..`end - 1`, as a walk through them needs them: an entry per layer, whole bytes.

    `peaks` are above what the layers in front hold (`stacked`), or above all that is held. Those of backward include
    the stage's output, which the engine holds, and those of the first backward the gradients of the layers behind.
    """

    first: int
    end: int
    stacked: bool
    peaks: LayerPeaks
    """Shape (2, end - first)."""
    held: FloatArray
    """Shape (2, end - first): what each layer leaves behind, pending storages not counted."""
    pending: tuple[tuple[Pending, ...], ...]
    """What each layer makes."""
    again: NDArray[np.bool_]
    """Which layers are computed again if they are chosen to be: those that have a backward."""
    passed: FloatArray
    """Shape (end - first + 1,): of the stage's copy of its input, what goes into each layer, and out of the last."""

    @classmethod
    def of(cls, costs: ChainCosts, first: int, end: int) -> "StageLayers":
        """The layers of a stage.

        Complexity: O(L).
        """
        made, stage = costs.storages.maker, slice(first, end)
        by_maker, unkept = np.rint(costs.storages.kept_by_maker), np.rint(costs.storages.kept_by_nobody)
        copied = np.rint(costs.boundaries.copied_input[stage])
        # A first layer that is not recomputed works on a copy that the stage makes.
        own_copy = np.where(np.arange(first, end) == first, copied, 0.0)
        again = _per_layer(costs, costs.storages.kept_by_readers)
        kept = again + most_savings(costs)[0]
        pending: list[list[Pending]] = [[] for _ in range(first, end)]
        for n in np.flatnonzero((made >= first) & (made < end) & (by_maker + unkept > 0)):
            sizes = (float(unkept[n]), float(by_maker[n] + unkept[n]))
            pending[made[n] - first].append(Pending(int(costs.storages.until[n]), sizes))
        return cls(
            first=first,
            end=end,
            stacked=costs.exact,
            peaks=_peaks(costs, first, end, copied, own_copy) if costs.exact else _transients(costs, stage),
            held=np.stack([own_copy + kept[stage], copied + again[stage] + np.rint(costs.state.rewritten[stage])]),
            pending=tuple(map(tuple, pending)),
            again=costs.has_backward[stage],
            passed=_passed(costs, unkept, first, end) * (copied[0] > 0),
        )

    def levels(self, recomputed: Collection[int]) -> StageLevels:
        """The stage with the layers `recomputed` (counted along the chain) computed again.

        Complexity: O(end - first).
        """
        again = np.zeros((1, self.end - self.first), dtype=np.bool_)
        again[0, [n - self.first for n in recomputed]] = True
        return StageLevels(*(float(each[0]) for each in self.many_levels(again)))

    def many_levels(self, again: NDArray[np.bool_]) -> ManyLevels:
        """The stage with layers computed again in N ways at once.

        Args:
            again: Which layers, shape (N, end - first); those without a backward never are.

        Complexity: O(N (end - first)).
        """
        num = len(again)
        held, highest = np.zeros(num), [np.zeros(num)] * len(LayerPeaks._fields)
        pending: list[tuple[int, FloatArray]] = []
        for n in range(self.end - self.first):
            is_again = again[:, n] & self.again[n]
            waiting = np.sum([size for _, size in pending], axis=0) if pending else np.zeros(num)
            taken = np.where(is_again, waiting, 0.0)
            bases = (held + waiting + self.passed[n], held + taken, held + taken)
            peaks = (np.where(is_again, rows[AGAIN, n], rows[KEPT, n]) for rows in self.peaks)
            tops = [base * self.stacked + peak for base, peak in zip(bases, peaks, strict=True)]
            highest = [np.maximum(*pair) for pair in zip(highest, tops, strict=True)]
            held = held + np.where(is_again, self.held[AGAIN, n], self.held[KEPT, n]) + taken
            pending = [
                *((until, np.where(is_again, 0.0, size)) for until, size in pending if until > self.first + n),
                *((made.until, np.where(is_again, made.bytes[AGAIN], made.bytes[KEPT])) for made in self.pending[n]),
            ]
        # What goes out of the last layer is held by the engine.
        leaving = np.sum([size for _, size in pending], axis=0) if pending else np.zeros(num)
        return ManyLevels(held + leaving + self.passed[-1], *highest)


def most_savings(costs: ChainCosts) -> tuple[FloatArray, FloatArray]:
    """For every layer, how many bytes less a micro-batch holds at most if it is recomputed.

    Returns:
        Two arrays of shape (L,): if the layer is the first of its stage, which is given its input; and if it is not,
        and has to keep what nobody else keeps of its input.
    """
    dropped = np.rint(costs.levels.internal) + _per_layer(costs, costs.storages.kept_by_maker)
    # What goes on to other layers, too, one of these may keep already.
    own = (costs.storages.maker >= 0) & (costs.storages.until == costs.storages.maker + 1)
    sizes = np.where(own, np.rint(costs.storages.kept_by_nobody), 0.0)
    kept = np.bincount(costs.storages.until[own], sizes[own], minlength=costs.num_layers + 1)[:-1]
    return dropped, np.maximum(dropped - kept, 0.0)


def least_levels(costs: ChainCosts, firsts: NDArray[np.int64], span: slice) -> tuple[FloatArray, LayerPeaks]:
    """What many stages hold in the end, and their levels, with nothing recomputed, or below.

    Whatever is recomputed, its `most_savings` added: what is held in the end is no less than this, and if the savings
    of layers in front of the highest are added to it, no level is less either.

    Returns:
        Arrays of shape (firsts, span); row a, column e is the stage of layers `firsts[a]`..`span.start + e`. Values
        left of a row's own first layer mean nothing.
    """
    kept = most_savings(costs)[0] + _per_layer(costs, costs.storages.kept_by_readers)
    unkept, into = np.rint(costs.storages.kept_by_nobody), np.zeros(costs.num_layers + 2)
    np.add.at(into, costs.storages.maker + 1, unkept)
    np.add.at(into, costs.storages.until + 1, -unkept)
    into = np.cumsum(into)
    layers = np.arange(costs.num_layers)[span]
    passing = Passing(costs, firsts, layers)
    copied = np.rint(costs.boundaries.copied_input)
    first, layer = firsts[:, None], layers[None, :]
    before = sums_before(kept)
    in_front = before[layer] - before[first] + copied[first]
    saved = in_front + kept[layer] + into[layer + 1] - passing.unkept

    def highest(peaks: FloatArray) -> FloatArray:
        running: FloatArray = np.maximum.accumulate(np.where(layer >= first, peaks, -np.inf), axis=1)
        return running

    (forward, first_backward, backward), no_grad = _layer_peaks(costs)
    if not costs.exact:
        transient = highest(np.broadcast_to(backward[layer], saved.shape))
        return saved, LayerPeaks(transient, transient, transient)
    received = passing.in_front(passing.unkept, into[layers])
    forward = np.minimum(forward, no_grad)[layer] + into[layer] - received
    output, through = np.rint(costs.boundaries.output)[layer], np.cumsum(np.rint(costs.gradients))
    casts = sums_before(np.rint(costs.state.casts))
    casts_through = casts[layer + 1]
    at_end = copied[first] + highest(np.rint(cast_gradient_peaks(costs))[layer]) + casts_through - casts[first]
    at_end = np.where(casts_through > casts[first], at_end, 0.0)

    def highest_backward(
        peaks: FloatArray, behind: FloatArray, end_twice: FloatArray, backward: Backward
    ) -> FloatArray:
        tops = before[layers] + (peaks - behind)[layers]
        highest = passing.highest_backward(tops, np.rint(end_twice)[layers], backward)
        return highest + behind[layer] + copied[first] - before[first]

    return saved, LayerPeaks(
        highest(in_front + forward),
        highest_backward(first_backward, through, costs.levels.end_twice_first, "first") + output,
        np.maximum(highest_backward(backward, casts[1:], costs.levels.end_twice, "later"), at_end - passing.all)
        + output,
    )


def _peaks(costs: ChainCosts, first: int, end: int, copied: FloatArray, own_copy: FloatArray) -> LayerPeaks:
    stage, passing = slice(first, end), Passing(costs, np.array([first]), np.arange(first, end))
    # The gradient of what passes by is the engine's own; of the last layer's output, it is not among its peaks.
    gone_by = float(passing.all[0, -1])
    counted_twice = np.zeros((2, end - first)) + passing.gradients(np.array([end - 1]))[:, 0]
    counted_twice[:, -1] = float(passing.kept[0, -1]), 0.0
    all_kept, all_no_grad = _layer_peaks(costs)
    forward, first_backward, backward = (peak[stage] for peak in all_kept)
    rewritten = np.rint(costs.state.rewritten[stage])
    output, gradients = np.rint(costs.boundaries.output[stage]), np.rint(costs.gradients[stage])
    behind = gradients.sum() - np.cumsum(gradients)
    casts = np.rint(costs.state.casts[stage])
    casts_behind = casts.sum() - np.cumsum(casts)
    # The gradient of the stage's own output is counted with the engine's transfers.
    again = np.append(np.rint(costs.boundaries.output_gradient[first : end - 1]), 0.0) + forward + rewritten
    own_output = output[-1] - gone_by
    later = np.stack([own_copy + backward, copied + np.maximum(again, backward)]) + casts_behind
    later += waiting_in(costs, "later", first, end)
    later += own_output - counted_twice
    later[KEPT, -1] -= np.rint(costs.levels.end_twice[end - 1])
    sooner = np.stack([own_copy + first_backward, copied + np.maximum(again, first_backward)]) + behind
    sooner += own_output - counted_twice + waiting_in(costs, "first", first, end)
    sooner[KEPT, -1] -= np.rint(costs.levels.end_twice_first[end - 1])
    if casts.any():
        # In front of the first layer nothing is held, as at the end of the backward (but a copy of the input).
        at_end = copied[0] + np.rint(cast_gradient_peaks(costs)[stage]).max() + casts.sum() + own_output
        later[:, 0] = np.maximum(later[:, 0], at_end)
    return LayerPeaks(
        np.stack([own_copy + forward, copied + all_no_grad[stage] + rewritten]),
        sooner,
        later,
    )


def cast_gradient_peaks(costs: ChainCosts) -> FloatArray:
    """What turning the gradients of a layer's `casts` into those of its parameters takes at most, beside `casts` bytes.

    Of exact records. Autograd runs what was recorded last first. The copies were recorded by the first micro-batch, so
    in the backward of a later one their gradients all wait until everything else is done, stage by stage.
    """
    return np.maximum(_layer_peaks(costs)[0].backward - costs.state.casts, 0.0)


def recomputed_levels(costs: ChainCosts) -> tuple[FloatArray, FloatArray]:
    """The levels of a first backward that is recomputed, where there are copies, and what waits behind each layer.

    Gradients of copies wait, and gradients of parameters without a copy exist at once.

    Returns:
        Bytes, of shape (L,): levels as `Levels.backward`, all that waits to the end of the chain included; and what
        waits of the layers up to each one.
    """
    uncopied = np.maximum(costs.gradients - 2 * costs.state.casts, 0.0)
    level = costs.levels.backward - np.cumsum(uncopied) + uncopied + uncopied.sum()
    return level, np.cumsum(costs.state.casts + uncopied)


def _transients(costs: ChainCosts, stage: slice) -> LayerPeaks:
    kept = _layer_peaks(costs)[0].backward[stage]
    rows = np.stack([kept, kept + np.rint(np.maximum(costs.levels.saved, costs.boundaries.output))[stage]])
    return LayerPeaks(rows, rows, rows)


def _layer_peaks(costs: ChainCosts) -> tuple[LayerPeaks, FloatArray]:
    """The peaks of layers that are not recomputed, shape (L,), and of their forward without gradients."""
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
    """Sizes of storages summed over the layers that make them."""
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
