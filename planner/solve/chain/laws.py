"""Labels of the dynamic program: how the time of a partial plan grows, from the last stage to the first.

A partial plan that covers layers i..L-1 is a label of a few numbers; smaller is never worse. A law computes how the
numbers change when a previous stage is added, and bounds the step time of every completion:

    layers    0 ........ h-1 | h ...... i-1 | i ................ L-1
            earlier layers   |    stage     |  label: numbers
              lower bounds   |  F  B  q  U  |
                             |______________|  extend -> label of layers h..L-1

The letters are those of docs/cost-model.md:

    M           micro-batches
    F, B, q     forward of the added stage; backward of micro-batches 0..M-2, and of micro-batch M-1
    R           recomputation of the last micro-batch, part of q
    C           transfer to the next stage, once
    U           all-reduce and optimizer step of the stage
    w           micro-batches in flight, min(M, K-k) under 1F1B

**GPipe** (exact, `planner.core.cost.step_time`):

    T = sum F + sum C + (M-1) max(F, C)  +  D  +  U

where D is the makespan of the backward flow shop and U what optimizers add. The label is

    f   largest forward time of any stage or link so far
    x   largest backward time so far
    a   sum of forward and backward times so far
    d   the last micro-batch's path: d = max(d, a + (M-2) x) + q for each further machine (see `flow_shop_us`)
    u   time that the optimizer steps of these stages add: u = max(U, u - (F + q - R + 2 C)) for an added stage

**1F1B** (a lower bound: the makespan is the longest of many paths, of which these matter most):

    g   time from the first forward to the last backward of the first stage so far, the longest of
          all its work, M F + M B;
          the round trip of the first micro-batch through all later stages, then the remaining M-1 backwards and
          M-w forwards of the stage, because w forwards run before that;
          consecutive round trips, because a micro-batch begins only after the w-th previous one has returned;
          g of the next stage, plus one forward, one backward and two transfers
    s   the first micro-batch's round trip, with its recomputation (y in the document)
    r   the round trip with the last micro-batch's backward (z in the document)
    u   as above
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.core.cost.stage_time import extended_tail_us
from planner.solve.space.arrays import BoolArray, FloatArray
from planner.solve.space.prefixes import BoundKind
from planner.solve.space.problem import Bottlenecks, StageArrays

Label = tuple[FloatArray, ...]
_Passed = tuple[FloatArray, FloatArray, FloatArray]
"""Numbers x, a and d of a label."""
_Machine = tuple[FloatArray, FloatArray, FloatArray]
"""Times F, p and q of a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierLayers:
    """Lower bounds of the layers before a label; arrays have the labels' shape."""

    work_us: FloatArray
    """Forward plus backward time of all earlier layers, in microseconds."""
    own_us: float
    """Time of the all-reduce and optimizer of the first stage, if there are earlier layers."""
    exist: BoolArray
    """True where there are earlier layers."""
    least: dict[str, FloatArray]
    """Lower bounds by the names in `Law.needs`."""


_NEEDS: dict[str, BoundKind] = {
    "forward": BoundKind(np.maximum, lambda stages: stages.forward),
    "backward": BoundKind(np.maximum, lambda stages: stages.backward),
    "peak": BoundKind(np.maximum, lambda stages: np.where(np.isfinite(stages.forward), stages.peak_bytes, np.inf)),
    "moved": BoundKind(np.add, lambda stages: np.where(np.isfinite(stages.forward), stages.sent_bytes, np.inf)),
    "squares": BoundKind(np.add, lambda stages: (stages.forward + stages.backward) ** 2),
}


def _needs(*names: str) -> dict[str, BoundKind]:
    return {name: _NEEDS[name] for name in names}


class Law(Protocol):
    """Definition of the numbers of a label, and of their bounds."""

    size: int
    rank_is_time: bool
    needs: dict[str, BoundKind]
    """Lower bounds of earlier layers that the law uses, by name."""

    def extend(self, label: Label, stages: StageArrays, level: int) -> Label:
        """Return the labels extended by each of `stages`.

        Args:
            label: Labels of shape (n, 1).
            stages: Stages to add.
            level: Number of later stages.

        Returns:
            Labels of the shape of `stages`.
        """

    def raised(self, label: Label, earlier: EarlierLayers) -> Label:
        """Return the label after raising its numbers to the lower bounds of earlier layers."""

    def bound_us(self, label: Label, earlier: EarlierLayers) -> FloatArray:
        """Return a lower bound of the step time of every completion; exact for complete labels."""

    def rank_bound(self, label: Label, earlier: EarlierLayers, bound_us: FloatArray) -> Label:
        """Return lower bounds of the numbers that rank every completion; exact for complete labels.

        Args:
            label: The labels.
            earlier: Lower bounds of the layers before them.
            bound_us: Lower bounds of the step time, from the method `bound_us`.
        """


class GPipeLaw:
    """GPipe's law, with labels (f, x, a, d, u).

    Args:
        micro_batches: M.
        floor: Lower bounds of the bottlenecks of every plan in the search, if known. They replace the lower bounds of
            the bottlenecks of earlier layers.
    """

    size = 5
    rank_is_time = True

    def __init__(self, micro_batches: int, floor: Bottlenecks | None = None) -> None:
        self._M = micro_batches
        self._floor = floor

        def passes(stages: StageArrays) -> FloatArray:
            backward = stages.backward if micro_batches > 1 else stages.last_backward
            return stages.forward + backward + 2 * stages.link

        # The sum comes first: it is infinite where first layers cannot be reached.
        self.needs = {"passes": BoundKind(np.add, passes), **({} if floor else _needs("forward", "backward"))}

    def _least_bottlenecks(self, earlier: EarlierLayers) -> tuple[FloatArray | float, FloatArray | float]:
        """Return lower bounds of f and x of the completed label."""
        return self._floor or (earlier.least["forward"], earlier.least["backward"])

    def extend(self, label: Label, stages: StageArrays, level: int) -> Label:  # noqa: ARG002 - GPipe's stages are all alike
        """Return the labels with the link to the next stage, then the stage, as machines of a flow shop."""
        f, x, a, d, u = label
        F, C = stages.forward, stages.link
        x, a, d = self._pass((x, a, d), (C, C, C))
        x, a, d = self._pass((x, a, d), (F, stages.backward, stages.last_backward))
        return np.maximum(np.maximum(f, C), F), x, a, d, extended_tail_us(u, stages.own_us, stages.hidden_us)

    def _pass(self, label: _Passed, machine: _Machine) -> _Passed:
        """Return x, a and d with one more machine."""
        (x, a, d), (F, p, q) = label, machine
        # One flow shop models both directions: forward times only add up.
        x, a, d = np.maximum(x, p), a + F + p, d + F
        # The last micro-batch continues at once, or waits until the slowest machine has finished the others.
        if self._M > 1:
            d = np.maximum(d, a + (self._M - 2) * x)
        return x, a, d + q

    def raised(self, label: Label, earlier: EarlierLayers) -> Label:
        """Raise f and x to the smallest possible ones of earlier layers, which every completion has."""
        f, x, a, d, u = label
        forward, backward = self._least_bottlenecks(earlier)
        f, x = np.maximum(f, forward), np.maximum(x, backward)
        return f, x, a, d, _raised_tail(u, earlier)

    def bound_us(self, label: Label, earlier: EarlierLayers) -> FloatArray:
        """Return T with the smallest possible sums, f and x of earlier layers."""
        f, x, a, d, u = label
        forward, backward = self._least_bottlenecks(earlier)
        f, x = np.maximum(f, forward), np.maximum(x, backward)
        if self._M == 1:
            d = d + earlier.least["passes"]
        else:
            # The last micro-batch follows the others through the slowest earlier stage.
            d = d if self._floor else np.maximum(d, a + (self._M - 1) * backward)
            # Or it waits for the recomputation of the others in all of them.
            d = np.maximum(d + earlier.work_us, a + earlier.least["passes"] + _times(self._M - 2, x))
        return d + _times(self._M - 1, f) + np.where(earlier.exist, earlier.own_us, u)

    def rank_bound(self, label: Label, earlier: EarlierLayers, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is all
        return (bound_us,)


class OneForwardOneBackwardLaw:
    """1F1B's law, with labels (g, s, r, u)."""

    size = 4
    rank_is_time = True

    def __init__(self, micro_batches: int) -> None:
        self._M = micro_batches

        def work(stages: StageArrays) -> FloatArray:
            backward = _times(micro_batches - 1, stages.backward) + stages.last_backward
            return micro_batches * stages.forward + backward

        self.needs = {**_needs("backward"), "work": BoundKind(np.maximum, work)}

    def extend(self, label: Label, stages: StageArrays, level: int) -> Label:
        """Return the labels with the longest of the four paths."""
        g, s, r, u = label
        M, w = self._M, min(self._M, level + 1)
        F, C, q = stages.forward, stages.link, stages.last_backward
        # A single micro-batch is the last one.
        B = stages.backward if M > 1 else q
        # The device computes all of its own work.
        work = M * F + (M - 1) * B + q
        s = s + 2 * C
        # After the first micro-batch come the backwards of the others, and the forwards that waited for it.
        first_back = F + s + (M - 1) * B + q + (M - w) * F
        s = s + F + B
        r = r + 2 * C + F + q
        # A micro-batch begins only after the w-th previous one has returned, so round trips are consecutive.
        trips = (M - 1) // w * s + r
        # The slowest later stage also bounds it, plus one forward, one backward and two transfers.
        g = np.maximum(np.maximum(work, first_back), np.maximum(trips, g + (F + q + 2 * C)))
        return g, s, r, extended_tail_us(u, stages.own_us, stages.hidden_us)

    def raised(self, label: Label, earlier: EarlierLayers) -> Label:
        """Raise u only; g, s and r always count."""
        g, s, r, u = label
        return g, s, r, _raised_tail(u, earlier)

    def bound_us(self, label: Label, earlier: EarlierLayers) -> FloatArray:
        """Return the longest of three paths: g plus earlier work, work of an earlier stage, and a round trip."""
        g, s, _, u = label
        bound: FloatArray = np.maximum(
            np.maximum(g + earlier.work_us, earlier.least["work"]),
            s + earlier.work_us + _times(self._M - 1, earlier.least["backward"]),
        )
        return bound + np.where(earlier.exist, earlier.own_us, u)

    def rank_bound(self, label: Label, earlier: EarlierLayers, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is all
        """Return the bound of the step time, by which this law ranks plans."""
        return (bound_us,)


def _times(count: int, time: FloatArray) -> FloatArray:
    # Keep infinity, which means that nothing fits, if the count is 0.
    return count * time if count else np.where(np.isinf(time), np.inf, 0.0)


def _raised_tail(tail: FloatArray, earlier: EarlierLayers) -> FloatArray:
    # Earlier layers hide at least their own work of it, and the first stage always adds its own.
    return np.where(earlier.exist, np.maximum(tail, earlier.own_us + earlier.work_us), tail)


class TiedLaw:
    """Law with additional numbers, which rank partitions of equal step time lexicographically.

    Args:
        law: Law of the step time.
        ranks: Names in `_NEEDS`: `peak`, the highest peak memory; `moved`, bytes across cuts; `squares`, the sum of
            squared stage times, which is least for even stages.
    """

    rank_is_time = False

    def __init__(self, law: Law, *ranks: str) -> None:
        self._law = law
        self._ranks = _needs(*ranks)
        self.size = law.size + len(ranks)
        self.needs = {**law.needs, **self._ranks}

    def _ranked(self, label: Label) -> Iterator[tuple[str, BoundKind, FloatArray]]:
        for (name, need), number in zip(self._ranks.items(), label[self._law.size :], strict=True):
            yield name, need, number

    def extend(self, label: Label, stages: StageArrays, level: int) -> Label:
        """Return the labels with each additional number combined with the value of the stage."""
        more = [need.join(number, need.of(stages)) for _, need, number in self._ranked(label)]
        return *self._law.extend(label[: self._law.size], stages, level), *more

    def raised(self, label: Label, earlier: EarlierLayers) -> Label:
        """Raise additional numbers that are maxima; sums always count."""
        more = [
            np.maximum(number, earlier.least[name]) if need.join is np.maximum else number
            for name, need, number in self._ranked(label)
        ]
        return *self._law.raised(label[: self._law.size], earlier), *more

    def bound_us(self, label: Label, earlier: EarlierLayers) -> FloatArray:
        """Return the bound of the step time, without the additional numbers."""
        return self._law.bound_us(label[: self._law.size], earlier)

    def rank_bound(self, label: Label, earlier: EarlierLayers, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is equal
        """Return the additional numbers combined with the lower bounds of earlier layers."""
        return tuple(need.join(number, earlier.least[name]) for name, need, number in self._ranked(label))
