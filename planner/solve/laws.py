"""How the time of a partial plan grows, stage by stage from the last to the first: the labels of the programme.

A partial plan that covers layers i..L-1 is a label of a few numbers, none of which is ever better when larger. A law
says how they change when a stage is put in front, and bounds the step time of every way to complete the plan.

**GPipe** (exact, `planner.core.cost.step_time`):

    T = sum F + sum C + (M-1) max(F, C)  +  D  +  U

where D is the makespan of the backward flow shop and U what optimizers add. The label is

    f   largest forward time of any stage or link so far
    x   largest backward time so far
    a   sum of forward and backward times so far
    d   the last micro-batch's path: d = max(d, a + (M-2) x) + q for each further machine (see `flow_shop_us`)
    u   what the optimizers' steps of these stages would add: u = max(U_k, u - (F + B + 2 C)) for a stage k in front

**1F1B** (a lower bound: the schedule's makespan is the longest of many paths, these are the ones that matter):

    g   from the first forward to the last backward of the foremost stage so far: the longest of
          all its work, M F + M B;
          the first micro-batch through all stages behind and back, then what the schedule leaves for after it:
          M-1 further backwards and M-w forwards, w = min(M, K-k) having been done before;
          one round trip after the other, for a micro-batch may only begin when the w-th before it is back;
          the same of the stages behind, one forward, backward and two transfers later
    s   the first micro-batch's way there and back, with its recomputation
    r   the same with the last micro-batch's backward
    u   as above
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solve.problem import Stages

__all__ = ["Ahead", "EvenLaw", "GPipeLaw", "Law", "OneForwardOneBackwardLaw", "PeakLaw"]

FloatArray = NDArray[np.float64]
Label = tuple[FloatArray, ...]


Combine = Literal["max", "sum"]


class Least(NamedTuple):
    """What the layers in front cost at least in some respect: the best over all ways to cut them into stages."""

    combine: Combine
    """How the stages' values make up the whole."""
    of: Callable[[Stages], FloatArray]
    """A stage's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What the layers in front of a label cost at least; arrays of the labels' shape."""

    work_us: FloatArray
    """Forward and backward of all of them."""
    own_us: float
    """All-reduce and optimizer of the first stage, if layers are in front."""
    some: NDArray[np.bool_]
    """Whether there are layers in front."""
    least: dict[str, FloatArray]
    """By the names in `Law.needs`."""


_NEEDS: dict[str, Least] = {
    "forward": Least("max", lambda stages: stages.forward),
    "backward": Least("max", lambda stages: stages.backward),
    "peak": Least("max", lambda stages: np.where(np.isfinite(stages.forward), stages.peak_bytes, np.inf)),
    "moved": Least("sum", lambda stages: np.where(np.isfinite(stages.forward), stages.sent_bytes, np.inf)),
    "squares": Least("sum", lambda stages: (stages.forward + stages.backward) ** 2),
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
    """Labels (f, x, a, d, u)."""

    size = 5
    rank_is_time = True
    needs = _needs("forward", "backward")

    def __init__(self, micro_batches: int) -> None:
        self._extra = micro_batches - 1

    def extend(self, label: Label, stages: Stages, level: int) -> Label:  # noqa: ARG002 - GPipe's stages are all alike
        """See `Law`."""
        longest, most, total, done, tail = label
        link = stages.link
        so_far = self._pass((total, most, done), link, link, link)
        longest = np.maximum(np.maximum(longest, link), stages.forward)
        hidden = stages.forward + stages.backward_alone + 2 * link + stages.received
        total, most, done = self._pass(so_far, stages.forward, stages.backward, stages.last_backward)
        return longest, most, total, done, np.maximum(stages.own, tail - hidden)

    def _pass(
        self, so_far: tuple[FloatArray, FloatArray, FloatArray], ahead: FloatArray, p: FloatArray, q: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        # Both flow shops are summed up in one: a machine's forward time is simply waited for.
        total, most, done = so_far
        total, most = total + ahead + p, np.maximum(most, p)
        done = done + ahead
        if self._extra > 0:
            done = np.maximum(done, total + (self._extra - 1) * most)
        return total, most, done + q

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """See `Law`."""
        longest, most, total, done, tail = label
        return (
            np.maximum(longest, ahead.least["forward"]),
            np.maximum(most, ahead.least["backward"]),
            total,
            done,
            _raised_tail(tail, ahead),
        )

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """See `Law`."""
        longest, _, total, done, tail = label
        if self._extra > 0:
            # The last micro-batch follows the others through the slowest stage in front, if it is in front.
            done = np.maximum(done, total + self._extra * ahead.least["backward"])
        longest = np.maximum(longest, ahead.least["forward"])
        bound = done + ahead.work_us + _times(self._extra, longest)
        return bound + np.where(ahead.some, ahead.own_us, tail)

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is all
        """See `Law`."""
        return (bound_us,)


class OneForwardOneBackwardLaw:
    """Labels (g, s, r, u)."""

    size = 4
    rank_is_time = True

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

        def work(stages: Stages) -> FloatArray:
            backward = _times(micro_batches - 1, stages.backward) + stages.last_backward
            return micro_batches * stages.forward + backward

        self.needs = {**_needs("backward"), "work": Least("max", work)}

    def extend(self, label: Label, stages: Stages, level: int) -> Label:
        """See `Law`; the stage of level n has n stages behind it."""
        longest, there_and_back, last_there_and_back, tail = label
        count = self._micro_batches
        in_flight = min(count, level + 1)
        link, forward, last = stages.link, stages.forward, stages.last_backward
        backward = stages.backward if count > 1 else last
        behind = there_and_back + 2 * link
        again = forward + behind + (count - 1) * backward + last + (count - in_flight) * forward
        work = count * forward + (count - 1) * backward + last
        around = last_there_and_back + 2 * link + forward + last
        trips = (count - 1) // in_flight * (behind + forward + backward) + around
        step = forward + last + 2 * link
        longest = np.maximum(np.maximum(work, again), np.maximum(trips, longest + step))
        hidden = forward + stages.backward_alone + 2 * link + stages.received
        return longest, behind + forward + backward, around, np.maximum(stages.own, tail - hidden)

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """See `Law`."""
        *others, tail = label
        return *others, _raised_tail(tail, ahead)

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """See `Law`."""
        longest, there_and_back, _, tail = label
        bound: FloatArray = np.maximum(
            np.maximum(longest + ahead.work_us, ahead.least["work"]),
            there_and_back + ahead.work_us + _times(self._micro_batches - 1, ahead.least["backward"]),
        )
        return bound + np.where(ahead.some, ahead.own_us, tail)

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is all
        """See `Law`."""
        return (bound_us,)


def _times(count: int, time: FloatArray) -> FloatArray:
    # 0 times infinity is not a number, but "fits nowhere" stays so however often it is done.
    return count * time if count else np.where(np.isinf(time), np.inf, 0.0)


def _raised_tail(tail: FloatArray, ahead: Ahead) -> FloatArray:
    # The layers in front hide at least their own work of it, and the first stage adds its own in any case.
    return np.where(ahead.some, np.maximum(tail, ahead.own_us + ahead.work_us), tail)


class _Tied:
    """A law with more numbers behind its own, for the best among plans of equal step time."""

    rank_is_time = False

    def __init__(self, law: Law, *more: str) -> None:
        self._law = law
        self._more = len(more)
        self.size = law.size + len(more)
        self.needs = {**law.needs, **_needs(*more)}

    def bound_us(self, label: Label, ahead: Ahead) -> FloatArray:
        """See `Law`."""
        return self._law.bound_us(label[: -self._more], ahead)


class PeakLaw(_Tied):
    """Lowest peak memory of any device: one more number, the largest so far."""

    def __init__(self, law: Law) -> None:
        super().__init__(law, "peak")

    def extend(self, label: Label, stages: Stages, level: int) -> Label:
        """See `Law`."""
        *timed, peak = label
        return *self._law.extend(tuple(timed), stages, level), np.maximum(peak, stages.peak_bytes)

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """See `Law`."""
        *timed, peak = label
        return *self._law.raised(tuple(timed), ahead), np.maximum(peak, ahead.least["peak"])

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is equal
        """See `Law`."""
        return (np.maximum(label[-1], ahead.least["peak"]),)


class EvenLaw(_Tied):
    """Fewest bytes moved, then the evenest stages: the sum of squares of their times."""

    def __init__(self, law: Law) -> None:
        super().__init__(law, "moved", "squares")

    def extend(self, label: Label, stages: Stages, level: int) -> Label:
        """See `Law`."""
        *timed, moved, squares = label
        times = self._law.extend(tuple(timed), stages, level)
        return *times, moved + stages.sent_bytes, squares + (stages.forward + stages.backward) ** 2

    def raised(self, label: Label, ahead: Ahead) -> Label:
        """See `Law`."""
        return *self._law.raised(label[:-2], ahead), *label[-2:]

    def rank_bound(self, label: Label, ahead: Ahead, bound_us: FloatArray) -> Label:  # noqa: ARG002 - time is equal
        """See `Law`."""
        return label[-2] + ahead.least["moved"], label[-1] + ahead.least["squares"]
