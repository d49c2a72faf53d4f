"""How many of every part of a stage's memory there are at each moment of a device's program.

The law of memory is

    bytes at a moment = always + sum over parts of count * part        (one sum for each stage on the device)

Parts are in `planner.core.cost.parts`; counts are here. They follow from the program of the device, instruction by
instruction:

    instruction    makes                                        takes away
    receive F      input                                        -
    F              held; kept if it is the last micro-batch     input
    send F         -  (the output is in `held` and `kept`)      -
    receive B      output gradient                              -
    B              gradients, if it is the first one            held or kept, output gradient
    I              gradients (of I), if it is the first one     held or kept, output gradient
                   weight held                                  -
    W              gradients, if it is the first one            weight held; gradients (of I)
    send B         input gradient                               the input gradients before it

While `F`, `B`, `I` or `W` runs there is one of `forward`, `last forward`, `first backward`, `backward` or `last
backward`, or likewise of the halves, all of its micro-batch included: what it takes away is gone by then, what it makes
is not there yet. With replicas the last backward is there a second time as `message`, with gradients on their way.
`casts` are there from begin to end, but for the optimizer's step; twice where some backwards of a stage are whole and
others run in halves, since autocast keeps copies for those, and the executor for these.

    GPipe, M = 3, device 1     F0        F1        F2            B0              B1        B2             step
    runs                       forward   forward   last forward  first backward  backward  last backward  optimizer step
    held, kept                 0, 0      1, 0      2, 0          1, 1            0, 1      0, 0           0, 0
    gradients                  0         0         0             0               1         1              1
    input, input gradient      1, 0      1, 0      0, 0          0, 0            0, 1      0, 1           0, 0

    1F1B, M = 3, device 1 of 3 F0        F1        B0            F2              B1        B2             step
    runs                       forward   forward   first back…   last forward    backward  last backward  optimizer step
    held, kept                 0, 0      1, 0      1, 0          1, 0            0, 1      0, 0           0, 0
    gradients                  0         0         0             1               1         1              1
    input, input gradient      1, 0      1, 0      1, 0          0, 1            0, 1      0, 1           0, 0

Long programs have few moments that can be the peak. `stage_moments` has them in closed form for devices with one stage
(K = 128 devices with M = 4096 micro-batches are a million instructions); `moments_of` takes any program.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from planner.core.schedule import Action, Instruction, Letter, Schedule, programs

IntArray = NDArray[np.int64]

PartName = Literal[
    "gradients",
    "input_backward_gradients",
    "casts",
    "held",
    "kept",
    "weight_held",
    "input",
    "output_gradient",
    "input_gradient",
    "forward",
    "last_forward",
    "first_backward",
    "backward",
    "last_backward",
    "first_input_backward",
    "input_backward",
    "last_input_backward",
    "first_weight_backward",
    "weight_backward",
    "message",
    "weight_message",
    "optimizer_step",
]

PARTS: Final[tuple[PartName, ...]] = get_args(PartName)

FORWARDS: Final[tuple[PartName, ...]] = ("forward", "last_forward")
BACKWARDS: Final[tuple[PartName, ...]] = ("first_backward", "backward", "last_backward")
INPUT_BACKWARDS: Final[tuple[PartName, ...]] = ("first_input_backward", "input_backward", "last_input_backward")
WEIGHT_BACKWARDS: Final[tuple[PartName, ...]] = ("first_weight_backward", "weight_backward")
_PLACE: Final[Mapping[PartName, int]] = {part: place for place, part in enumerate(PARTS)}


# ---- closed forms, for a device with one stage


Moment = tuple[tuple[PartName, int], ...]
"""The parts that are there at a moment, and how many of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The moments of a device with one stage that can be its peak; in the order of the program."""

    micro_batches: int
    """M."""
    in_flight: int
    """N: most micro-batches that wait for their backward or run."""
    alike: tuple[Moment, ...]
    """If the last micro-batch is recomputed as all others are."""
    apart: tuple[Moment, ...]
    """If it is not."""


def stage_moments(schedule: Schedule, *, micro_batches: int, behind: int = 0) -> Moments:
    """The moments of a device that runs one stage.

    Args:
        schedule: GPipe or 1F1B: all forwards come first, or a few.
        micro_batches: M.
        behind: How many stages are behind this one.
    """
    return _moments_with(micro_batches, schedule.in_flight(0, behind + 1, micro_batches))


@lru_cache(maxsize=4096)
def _moments_with(micro_batches: int, in_flight: int) -> Moments:
    every = _fill_and_drain if in_flight == micro_batches else _steady
    alike, apart = (tuple(every(micro_batches, in_flight, last_differs=differs)) for differs in (False, True))
    return Moments(micro_batches=micro_batches, in_flight=in_flight, alike=alike, apart=apart)


def _moment(running: PartName, *, gradients: int = 1, **counts: int) -> Moment:
    during: dict[PartName, int] = {"gradients": gradients, **({} if running == "optimizer_step" else {"casts": 1})}
    during |= counts  # type: ignore[arg-type]
    return tuple((part, count) for part, count in (*during.items(), (running, 1)) if count)


def _fill_and_drain(m: int, _in_flight: int, *, last_differs: bool) -> Iterator[Moment]:
    """All M forwards, then all M backwards; of these, the later the fewer micro-batches wait.

    What can be the peak only if the last micro-batch has parts of its own is left out where it has none.
    """
    if m > 1 and last_differs:
        yield _moment("forward", held=m - 2, input=1, gradients=0)
    yield _moment("last_forward", held=m - 1, gradients=0)
    yield _moment("first_backward", held=max(0, m - 2), kept=int(m > 1), gradients=0)
    if m > 2:
        yield _moment("backward", held=m - 3, kept=1, input_gradient=1)
    if m == 2 or (m > 2 and last_differs):
        yield _moment("last_backward", input_gradient=1)
    yield _moment("message", gradients=int(m > 1), input_gradient=int(m > 1))
    yield _moment("optimizer_step")


def _steady(m: int, n: int, *, last_differs: bool) -> Iterator[Moment]:
    """N < M forwards, then a backward after each further forward, then the last N - 1 backwards."""
    yield _moment("forward", held=n - 1, input=1, gradients=0)
    if last_differs and m > n + 1:
        yield _moment("forward", held=n - 1, input_gradient=1)
    yield _moment("last_forward", held=n - 1, input_gradient=1)
    yield _moment("first_backward", held=n - 1, input=1, gradients=0)
    if m > n + 1:
        yield _moment("backward", held=n - 1, input=1, input_gradient=1)
    # Behind the last forward a micro-batch less is held each time.
    if n > 1 and (last_differs or m == n + 1):
        yield _moment("backward", held=n - 2, kept=1, input_gradient=1)
    if last_differs or m == n + 1:
        yield _moment("last_backward", input_gradient=1)
    yield _moment("message", input_gradient=1)
    yield _moment("optimizer_step")


# ---- any program, instruction by instruction


class Counts(NamedTuple):
    """How many of every part are on a device: arrays of shape (actions, V, parts)."""

    during: IntArray
    """While an action runs."""
    message: IntArray
    """The same, with gradients on their way in the last backward of a stage."""
    after: IntArray
    """Until the next one runs."""


def counts_of(actions: Sequence[Sequence[Action]]) -> tuple[Counts, ...]:
    """The counts during and after every forward and backward of each device."""
    last = max(action.micro_batch for action in actions[0])
    return tuple(_Walk(row, last).counts(program) for row, program in zip(actions, programs(actions), strict=True))


_MESSAGES: Final[Mapping[Letter, PartName]] = {"B": "message", "W": "weight_message"}
"""By what ends a micro-batch on a stage: the part of the last one with gradients on their way."""


class _Walk:
    """The counts of a device as its program runs; see the module's table."""

    def __init__(self, row: Sequence[Action], last: int) -> None:
        stages = sorted({action.stage for action in row})
        self._last = last
        self._chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
        self._backwards_left = [last + 1] * len(stages)
        self._now = np.zeros((len(stages), len(PARTS)), np.int64)
        ways = {(action.stage, action.kind) for action in row if action.kind in {"B", "I"}}
        self._now[:, _PLACE["casts"]] = [max(1, sum(of == stage for of, _ in ways)) for stage in stages]

    def counts(self, row: Sequence[Instruction]) -> Counts:
        during, message, after = [], [], []
        for what in row:
            if what.do != "run":
                self._transfer(what)
                continue
            running, chunk = self._begin(what), self._chunk_of[what.stage]
            during.append(self._with(chunk, running))
            self._backwards_left[chunk] -= what.kind in _MESSAGES
            is_final = what.kind in _MESSAGES and not self._backwards_left[chunk]
            message.append(self._with(chunk, _MESSAGES[what.kind] if is_final else running))
            self._end(what)
            after.append(self._now.copy())
        return Counts(np.array(during), np.array(message), np.array(after))

    def _with(self, chunk: int, running: PartName) -> IntArray:
        counts = self._now.copy()
        counts[chunk, _PLACE[running]] = 1
        return counts

    def _transfer(self, what: Instruction) -> None:
        here = self._now[self._chunk_of[what.stage]]
        match what.do, what.kind:
            case "receive", "F":
                here[_PLACE["input"]] += 1
            case "receive", "B":
                here[_PLACE["output_gradient"]] += 1
            case "send", "B":
                self._now[:, _PLACE["input_gradient"]] = 0
                here[_PLACE["input_gradient"]] = 1

    def _begin(self, what: Instruction) -> PartName:
        """Takes away what the micro-batch brings along; returns the part that is there while it runs."""
        here, is_last = self._now[self._chunk_of[what.stage]], what.micro_batch == self._last
        if what.kind == "F":
            # The first stage receives no input, and what stays on the device is in no buffer.
            here[_PLACE["input"]] = max(0, here[_PLACE["input"]] - 1)
            return "last_forward" if is_last else "forward"
        if what.kind == "W":
            here[_PLACE["weight_held"]] -= 1
            return "weight_backward" if here[_PLACE["gradients"]] else "first_weight_backward"
        here[_PLACE["output_gradient"]] = max(0, here[_PLACE["output_gradient"]] - 1)
        here[_PLACE["kept" if is_last else "held"]] -= 1
        if what.kind == "B":
            if not here[_PLACE["gradients"]]:
                here[_PLACE["input_backward_gradients"]] = 0
                return "first_backward"
            return "last_backward" if is_last else "backward"
        if not here[_PLACE["gradients"]] and not here[_PLACE["input_backward_gradients"]]:
            return "first_input_backward"
        return "last_input_backward" if is_last else "input_backward"

    def _end(self, what: Instruction) -> None:
        here = self._now[self._chunk_of[what.stage]]
        if what.kind == "F":
            here[_PLACE["kept" if what.micro_batch == self._last else "held"]] += 1
            return
        if what.kind == "I":
            here[_PLACE["weight_held"]] += 1
            here[_PLACE["input_backward_gradients"]] = 1 - here[_PLACE["gradients"]]
            return
        here[_PLACE["gradients"]] = 1
        here[_PLACE["input_backward_gradients"]] = 0


@lru_cache(maxsize=1024)
def moments_of(actions: tuple[tuple[Action, ...], ...]) -> tuple[IntArray, ...]:
    """For each device the counts that can be its peak: shape (moments, V, parts), the optimizer's step included.

    Those are left out in which others have as much of everything.
    """
    return tuple(
        _undominated(np.concatenate([counts.during, counts.message, optimizer_steps(counts)]))
        for counts in counts_of(actions)
    )


def optimizer_steps(counts: Counts) -> IntArray:
    """A moment for each chunk's part of the step, of which the largest counts; autocast is left by then."""
    chunks = counts.during.shape[1]
    steps = np.zeros((chunks, *counts.during.shape[1:]), np.int64)
    steps[:, :, _PLACE["gradients"]] = 1
    steps[np.arange(chunks), np.arange(chunks), _PLACE["optimizer_step"]] = 1
    return steps


def _undominated(counts: IntArray) -> IntArray:
    # Sorted by how many micro-batches wait, before anything else that differs while they run; of moments that are
    # equally high a plan shows the first one.
    waiting = counts.copy()
    waiting[:, :, _PLACE["held"]] += counts[:, :, _PLACE["kept"]]
    _, places = np.unique(waiting.reshape(len(counts), -1), axis=0, return_index=True)
    flat = counts[places].reshape(len(places), -1)
    # Only a later one can have as much of everything.
    highest = [n for n, one in enumerate(flat) if not (flat[n + 1 :] >= one).all(axis=1).any()]
    return counts[places[highest]]
