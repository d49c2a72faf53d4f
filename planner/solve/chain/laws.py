"""How the time of a partial plan grows, stage by stage from the last to the first: the labels of the dynamic program.

A partial plan that covers layers i..L-1 is a label of a few numbers, none of which is ever better when larger. A law
says how they change when a stage is put in front, and bounds the step time of every way to complete the plan:

    layers    0 ........ h-1 | h ...... i-1 | i ................ L-1
                 ahead       |    stage     |  label behind: numbers
              at least so    |  F  B  q  U  |
              much           |______________|  extend -> label of layers h..L-1

The letters are those of docs/cost-model.md:

    M           micro-batches
    F, B, q     forward of the stage in front; backward of micro-batches 0..M-2, and of micro-batch M-1
    W           backward without recomputation
    C           the link behind the stage, once
    U           all-reduce and optimizer's step of the stage
    w           micro-batches in flight, min(M, K-k) under 1F1B

**GPipe** (exact, `planner.core.cost.step_time`):

    T = sum F + sum C + (M-1) max(F, C)  +  D  +  U

where D is the makespan of the backward flow shop and U what optimizers add. The label is

    f   largest forward time of any stage or link so far
    x   largest backward time so far
    a   sum of forward and backward times so far
    d   the last micro-batch's path: d = max(d, a + (M-2) x) + q for each further machine (see `flow_shop_us`)
    u   what the optimizers' steps of these stages would add: u = max(U, u - (F + W + 2 C)) for a stage in front

**1F1B** (a lower bound: the schedule's makespan is the longest of many paths, these are the ones that matter):

    g   from the first forward to the last backward of the foremost stage so far: the longest of
          all its work, M F + M B;
          the first micro-batch through all stages behind and back, then what the schedule leaves for after it:
          M-1 further backwards and M-w forwards, w having been done before;
          one round trip after the other, for a micro-batch may only begin when the w-th before it is back;
          the same of the stages behind, one forward, backward and two transfers later
    s   the first micro-batch's way there and back, with its recomputation (y in the document)
    r   the same with the last micro-batch's backward (z in the document)
    u   as above
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.core.cost.stage_time import tail_in_front_us
from planner.solve.space.arrays import BoolArray, FloatArray
from planner.solve.space.prefixes import Least
from planner.solve.space.problem import Bottlenecks, Stages

Label = tuple[FloatArray, ...]
_Passed = tuple[FloatArray, FloatArray, FloatArray]
"""x, a and d."""
_Machine = tuple[FloatArray, FloatArray, FloatArray]
"""F, p and q."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What the layers in front of a label cost at least; arrays of the labels' shape."""

    work_us: FloatArray
    """Forward and backward of all of them."""
    own_us: float
    """All-reduce and optimizer of the first stage, if layers are in front."""
    some: BoolArray
    """Whether there are layers in front."""
    least: dict[str, FloatArray]
    """By the names in `Law.needs`."""


_NEEDS: dict[str, Least] = {
    "forward": Least(np.maximum, lambda stages: stages.forward),
    "backward": Least(np.maximum, lambda stages: stages.backward),
    "peak": Least(np.maximum, lambda stages: np.where(np.isfinite(stages.forward), stages.peak_bytes, np.inf)),
    "moved": Least(np.add, lambda stages: np.where(np.isfinite(stages.forward), stages.sent_bytes, np.inf)),
    "squares": Least(np.add, lambda stages: (stages.forward + stages.backward) ** 2),
}


def _needs(*names: str) -> dict[str, Least]:
    return {name: _NEEDS[name] for name in names}


class Law(Protocol):
    """How the numbers of a label change."""

    size: int
    rank_is_time: bool
    needs: dict[str, Least]
    """What is to be known of the layers in front."""

    def extend(self, label: Label, stages: Stages, level: int) -> Label:
        """The labels with each of `stages` in front; `label` has shape (n, 1), the result that of `stages`."""

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """The label with what cannot decide any more raised to what the layers in front cost at least."""

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """Below the step time of every completion; the step time itself where nothing is in front."""

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:
        """Below what every completion of the label ranks by, and what complete labels rank by; first number first."""


class GPipeLaw:
    """Labels (f, x, a, d, u).

    Args:
        micro_batches: M.
        floor: Below the largest forward and backward time of every plan that is looked for, if that is known: then
            nothing is worked out for each layer about the largest in front.
    """

    size = 5
    rank_is_time = True

    def __init__(self, micro_batches: int, floor: Bottlenecks | None = None) -> None:
        self._M = micro_batches
        self._floor = floor

        def passes(stages: Stages) -> FloatArray:
            backward = stages.backward if micro_batches > 1 else stages.last_backward
            return stages.forward + backward + 2 * stages.link

        # First the sum, which tells what can be reached: it is infinite where the others are.
        self.needs = {"passes": Least(np.add, passes), **({} if floor else _needs("forward", "backward"))}

    def _largest_ahead(self, ahead: Ahead) -> tuple[FloatArray | float, FloatArray | float]:
        """Below the largest f and x of the completed label."""
        return self._floor or (ahead.least["forward"], ahead.least["backward"])

    def extend(self, label: Label, stages: Stages, level: int) -> Label:  # noqa: ARG002 - GPipe's stages are all alike
        """Puts the link behind the stage in front first, then the stage: machines of a flow shop one by one."""
        f, x, a, d, u = label
        F, C = stages.forward, stages.link
        x, a, d = self._pass((x, a, d), (C, C, C))
        x, a, d = self._pass((x, a, d), (F, stages.backward, stages.last_backward))
        return np.maximum(np.maximum(f, C), F), x, a, d, tail_in_front_us(u, stages.own_us, stages.hidden_us)

    def _pass(self, label: _Passed, machine: _Machine) -> _Passed:
        """One more machine with its forward time, and p and q of its backward."""
        (x, a, d), (F, p, q) = label, machine
        # Both flow shops are summed up in one: a machine's forward time is simply waited for.
        x, a, d = np.maximum(x, p), a + F + p, d + F
        # The last micro-batch goes on at once, or waits until the slowest machine so far is through with the others.
        if self._M > 1:
            d = np.maximum(d, a + (self._M - 2) * x)
        return x, a, d + q

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """Whatever f and x are below the smallest possible ones in front, the whole plan has those."""
        f, x, a, d, u = label
        forward, backward = self._largest_ahead(ahead)
        f, x = np.maximum(f, forward), np.maximum(x, backward)
        return f, x, a, d, _raised_tail(u, ahead)

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """T with the smallest possible sums, f and x in front."""
        f, x, a, d, u = label
        forward, backward = self._largest_ahead(ahead)
        f, x = np.maximum(f, forward), np.maximum(x, backward)
        if self._M == 1:
            d = d + ahead.least["passes"]
        else:
            # The last micro-batch follows the others through the slowest stage in front, if it is in front.
            d = d if self._floor else np.maximum(d, a + (self._M - 1) * backward)
            # Or through all of them, behind what the others compute again.
            d = np.maximum(d + ahead.work_us, a + ahead.least["passes"] + _times(self._M - 2, x))
        return d + _times(self._M - 1, f) + np.where(ahead.some, ahead.own_us, u)

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is all
        return (bound_us,)


class OneForwardOneBackwardLaw:
    """Labels (g, s, r, u)."""

    size = 4
    rank_is_time = True

    def __init__(self, micro_batches: int) -> None:
        self._M = micro_batches

        def work(stages: Stages) -> FloatArray:
            backward = _times(micro_batches - 1, stages.backward) + stages.last_backward
            return micro_batches * stages.forward + backward

        self.needs = {**_needs("backward"), "work": Least(np.maximum, work)}

    def extend(self, label: Label, stages: Stages, level: int) -> Label:
        """Takes the longest of the four paths; the stage of level n has n stages behind it."""
        g, s, r, u = label
        M, w = self._M, min(self._M, level + 1)
        F, C, q = stages.forward, stages.link, stages.last_backward
        # A single micro-batch is the last one.
        B = stages.backward if M > 1 else q
        # All its own work: the device is never faster than that.
        work = M * F + (M - 1) * B + q
        s = s + 2 * C
        # Behind the first micro-batch come the backwards of the others, and the forwards that had to wait for it.
        first_back = F + s + (M - 1) * B + q + (M - w) * F
        s = s + F + B
        r = r + 2 * C + F + q
        # A micro-batch may only begin when the w-th before it is back: one round trip after the other.
        trips = (M - 1) // w * s + r
        # And whatever takes longest behind, one forward, backward and two transfers away.
        g = np.maximum(np.maximum(work, first_back), np.maximum(trips, g + (F + q + 2 * C)))
        return g, s, r, tail_in_front_us(u, stages.own_us, stages.hidden_us)

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """What stands in g, s and r of a label always counts; only u can be too small to decide."""
        g, s, r, u = label
        return g, s, r, _raised_tail(u, ahead)

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """The longest of g with all work in front, the work of a stage in front, and a round trip with its rest."""
        g, s, _, u = label
        bound: FloatArray = np.maximum(
            np.maximum(g + ahead.work_us, ahead.least["work"]),
            s + ahead.work_us + _times(self._M - 1, ahead.least["backward"]),
        )
        return bound + np.where(ahead.some, ahead.own_us, u)

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is all
        """The step time alone."""
        return (bound_us,)


def _times(count: int, time: FloatArray) -> FloatArray:
    # 0 times infinity is not a number, but "fits nowhere" stays so however often it is done.
    return count * time if count else np.where(np.isinf(time), np.inf, 0.0)


def _raised_tail(tail: FloatArray, ahead: Ahead) -> FloatArray:
    # The layers in front hide at least their own work of it, and the first stage adds its own in any case.
    return np.where(ahead.some, np.maximum(tail, ahead.own_us + ahead.work_us), tail)


class TiedLaw:
    """A law with more numbers behind its own, by which partitions of equal step time are ranked, the first one first.

    Args:
        law: What the step time is.
        ranks: Names in `_NEEDS`: `peak`, the highest of any device; `moved`, bytes across cuts; `squares` of the times
            of stages, least where these are even.
    """

    rank_is_time = False

    def __init__(self, law: Law, *ranks: str) -> None:
        self._law = law
        self._ranks = _needs(*ranks)
        self.size = law.size + len(ranks)
        self.needs = {**law.needs, **self._ranks}

    def _ranked(self, label: Label) -> Iterator[tuple[str, Least, FloatArray]]:
        for (name, need), number in zip(self._ranks.items(), label[self._law.size :], strict=True):
            yield name, need, number

    def extend(self, label: Label, stages: Stages, level: int) -> Label:
        """Each number takes the stage in as its need says."""
        more = [need.join(number, need.of(stages)) for _, need, number in self._ranked(label)]
        return *self._law.extend(label[: self._law.size], stages, level), *more

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """A maximum below the one in front cannot decide; sums count in any case."""
        more = [
            np.maximum(number, ahead.least[name]) if need.join is np.maximum else number
            for name, need, number in self._ranked(label)
        ]
        return *self._law.raised(label[: self._law.size], ahead), *more

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """The bound of the step time alone."""
        return self._law.bound_us(label[: self._law.size], ahead)

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is equal
        """The numbers with the least of what is in front."""
        return tuple(need.join(number, ahead.least[name]) for name, need, number in self._ranked(label))
