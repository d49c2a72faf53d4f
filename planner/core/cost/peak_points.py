"""Count the allocations of a stage at each point in a device's step.

    bytes at a point in the step = sum over the device's stages of (always + sum over allocations of count * size)

`planner.core.cost.allocations` computes the sizes. Counts follow from the device's instruction list (F: forward; B:
whole backward; I: input-gradient pass; W: weight-gradient pass):

    instruction    adds                                         removes
    receive F      input                                        -
    F              held (last micro-batch: kept)                input
    receive B      output gradient                              -
    B              gradients, if it is the first B              held or kept, output gradient
    I              weight held                                  held or kept, output gradient
    W              -                                            weight held
    first I        as I, and input backward gradients           as I
    first W        as W, and gradients                          as W, and input backward gradients
    send B         input gradient                               the previous input gradients

`held` and `kept` are the memory of a micro-batch between forward and backward. The last micro-batch has its own
allocation, because a stage may recompute only the others. `weight held` is stored by I for W. `input backward
gradients` are parameter gradients created by I. While an action runs, an allocation named after it, such as `first
backward`, includes all memory of its micro-batch. While replicas exchange gradients, `message` replaces `last
backward`. `casts` exists from the first forward to the last backward, twice if a stage has whole and split backwards.

In this example, each column has the counts during one action, without the running micro-batch. F1 is the forward of
micro-batch 1. Its input is received before F0 runs:

    1F1B, M = 3, device 1 of 3 F0        F1        B0            F2              B1        B2             step
    runs                       forward   forward   first back…   last forward    backward  last backward  optimizer step
    held, kept                 0, 0      1, 0      1, 0          1, 0            0, 1      0, 0           0, 0
    gradients                  0         0         0             1               1         1              1
    input, input gradient      1, 0      1, 0      1, 0          0, 1            0, 1      0, 1           0, 0

For a device with one stage, `stage_peak_points` returns the few points at which memory can peak. For other devices,
`peak_allocation_counts` finds these points by simulation.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat, starmap
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from planner.core.cost.arrays import IntArray
from planner.core.schedule import Action, Instruction, Letter, Schedule, instruction_lists

AllocationName = Literal[
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

ALLOCATIONS: Final[tuple[AllocationName, ...]] = get_args(AllocationName)

FORWARDS: Final[tuple[AllocationName, ...]] = ("forward", "last_forward")
BACKWARDS: Final[tuple[AllocationName, ...]] = ("first_backward", "backward", "last_backward")
INPUT_BACKWARDS: Final[tuple[AllocationName, ...]] = ("first_input_backward", "input_backward", "last_input_backward")
WEIGHT_BACKWARDS: Final[tuple[AllocationName, ...]] = ("first_weight_backward", "weight_backward")
WITH_BACKWARDS: Final[tuple[AllocationName, ...]] = (*BACKWARDS, "message", *INPUT_BACKWARDS)
"""Allocations during whole backwards and input-gradient passes, which receive the gradient of the stage's output."""
RUNNING: Final[tuple[AllocationName, ...]] = (*FORWARDS, *WITH_BACKWARDS, *WEIGHT_BACKWARDS, "weight_message")
"""Kinds of allocation that exist only while an action runs. A device has at most one of these allocations at a time."""
_PLACE: Final[Mapping[AllocationName, int]] = {name: place for place, name in enumerate(ALLOCATIONS)}

_MOST_COMPARED: Final = 2**22
"""Largest number of pairs of counts that are compared at once. A pair needs one byte of memory."""


# ---- closed forms, for a device with one stage


AllocationsAtPoint = tuple[tuple[AllocationName, int], ...]
"""Point in the step: the allocations that exist at this point, and their counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPoints:
    """Points in the step at which a device with one stage can have its peak memory, in order."""

    micro_batches: int
    """Number of micro-batches per step (M)."""
    in_flight: int
    """Largest number of micro-batches in flight (N)."""
    alike: tuple[AllocationsAtPoint, ...]
    """Points for a stage that recomputes all micro-batches or none."""
    apart: tuple[AllocationsAtPoint, ...]
    """Points for a stage that recomputes all micro-batches except the last one (`except-last`)."""


def stage_peak_points(schedule: Schedule, *, micro_batches: int, num_later: int = 0) -> PeakPoints:
    """Return the points in the step at which a device with one stage can have its peak memory.

    Args:
        schedule: GPipe or 1F1B.
        micro_batches: Number of micro-batches.
        num_later: Number of later stages in the pipeline.
    """
    return _points_with(micro_batches, schedule.in_flight(0, num_later + 1, micro_batches))


@lru_cache(maxsize=4096)
def _points_with(micro_batches: int, in_flight: int) -> PeakPoints:
    every = _fill_and_drain if in_flight == micro_batches else _warm_up_and_alternate
    alike, apart = (tuple(every(micro_batches, in_flight, last_differs=differs)) for differs in (False, True))
    return PeakPoints(micro_batches=micro_batches, in_flight=in_flight, alike=alike, apart=apart)


def _point(running: AllocationName, *, gradients: int = 1, **counts: int) -> AllocationsAtPoint:
    during: dict[AllocationName, int] = {
        "gradients": gradients,
        **({} if running == "optimizer_step" else {"casts": 1}),
    }
    during |= counts  # type: ignore[arg-type]
    return tuple((name, count) for name, count in (*during.items(), (running, 1)) if count)


def _fill_and_drain(m: int, _in_flight: int, *, last_differs: bool) -> Iterator[AllocationsAtPoint]:
    # M forwards, then M backwards. More points count if the last micro-batch is not recomputed like the others.
    if m > 1 and last_differs:
        yield _point("forward", held=m - 2, input=1, gradients=0)
    yield _point("last_forward", held=m - 1, gradients=0)
    yield _point("first_backward", held=max(0, m - 2), kept=int(m > 1), gradients=0)
    if m > 2:
        yield _point("backward", held=m - 3, kept=1, input_gradient=1)
    if m == 2 or (m > 2 and last_differs):
        yield _point("last_backward", input_gradient=1)
    yield _point("message", gradients=int(m > 1), input_gradient=int(m > 1))
    yield _point("optimizer_step")


def _warm_up_and_alternate(m: int, n: int, *, last_differs: bool) -> Iterator[AllocationsAtPoint]:
    # N < M forwards, then backwards and forwards in turn, then N - 1 backwards.
    yield _point("forward", held=n - 1, input=1, gradients=0)
    if last_differs and m > n + 1:
        yield _point("forward", held=n - 1, input_gradient=1)
    yield _point("last_forward", held=n - 1, input_gradient=1)
    yield _point("first_backward", held=n - 1, input=1, gradients=0)
    if m > n + 1:
        yield _point("backward", held=n - 1, input=1, input_gradient=1)
    # After the last forward, each backward reduces the number of waiting micro-batches.
    if n > 1 and (last_differs or m == n + 1):
        yield _point("backward", held=n - 2, kept=1, input_gradient=1)
    if last_differs or m == n + 1:
        yield _point("last_backward", input_gradient=1)
    yield _point("message", input_gradient=1)
    yield _point("optimizer_step")


# ---- any instruction list, instruction by instruction


class AllocationCounts(NamedTuple):
    """Number of allocations of each kind (`ALLOCATIONS`) on a device; shape (actions, chunks, allocations)."""

    during: IntArray
    """Counts of allocations while each action runs."""
    sending: IntArray
    """Counts as in `during`, but of the time when a stage's last backward sends gradients to other replicas."""
    after: IntArray
    """Counts between each action and the next one."""


class AllocationCountChanges(NamedTuple):
    """Changes of a device's counts of allocations (`ALLOCATIONS`) by one action.

    Changes are pairs of numbers i, n: add n to count i. The counts of chunk 0 come first, in the order of
    `ALLOCATIONS`, then those of chunk 1, and so on.
    """

    before: tuple[int, ...]
    """Changes between the previous action and this one, by transfers, and all changes at the start of this action."""
    running: tuple[int, ...]
    """Index of the count that is 1 while the action runs.

    A stage's last backward or weight-gradient pass has a second index: the count that is 1 while it sends gradients.
    """
    after: tuple[int, ...]
    """Changes at the end of the action."""


def allocation_count_changes(actions: Sequence[Sequence[Action]]) -> tuple[tuple[AllocationCountChanges, ...], ...]:
    """Return, for each device, the changes of allocation counts by each action, then by each chunk's optimizer step."""
    return tuple(tuple(_AllocationCounter(row, last).changes(program)) for row, program, last in _programs(actions))


def _programs(actions: Sequence[Sequence[Action]]) -> Iterator[tuple[Any, tuple[Instruction, ...], int]]:
    # Return the actions and instructions of each device, and the last micro-batch.
    return zip(actions, instruction_lists(actions), repeat(max(action.micro_batch for action in actions[0])))


def allocation_counts(actions: Sequence[Sequence[Action]]) -> tuple[AllocationCounts, ...]:
    """Return, for each device, the number of allocations of each kind (`ALLOCATIONS`) during and after every action."""
    chunks = len({action.stage for action in actions[0]})
    return tuple(_counts(changes[:-chunks], chunks) for changes in allocation_count_changes(actions))


def _counts(changes: Sequence[AllocationCountChanges], chunks: int) -> AllocationCounts:
    before, after = (_dense(rows, chunks) for rows in ([c.before for c in changes], [c.after for c in changes]))
    between = np.cumsum(before + after, axis=0) - after
    during, sending = between.copy(), between.copy()
    rows = np.arange(len(changes))
    during[rows, [change.running[0] for change in changes]] = 1
    sending[rows, [change.running[-1] for change in changes]] = 1
    shape = len(changes), chunks, len(ALLOCATIONS)
    return AllocationCounts(during.reshape(shape), sending.reshape(shape), (between + after).reshape(shape))


def _dense(rows: Sequence[tuple[int, ...]], chunks: int) -> IntArray:
    dense = np.zeros((len(rows), chunks * len(ALLOCATIONS)), np.int64)
    flat = np.array([number for row in rows for number in row], np.int64).reshape(-1, 2)
    dense[np.repeat(np.arange(len(rows)), [len(row) // 2 for row in rows]), flat[:, 0]] = flat[:, 1]
    return dense


_MESSAGES: Final[Mapping[Letter, AllocationName]] = {"B": "message", "W": "weight_message"}
"""Allocation of a stage's last B or W while it sends gradients to other replicas, instead of its usual allocation."""


class _AllocationCounter:
    def __init__(self, row: Sequence[Action], last: int) -> None:
        stages = sorted({action.stage for action in row})
        self._last = last
        self._bases = {stage: chunk * len(ALLOCATIONS) for chunk, stage in enumerate(stages)}
        self._backwards_left = dict.fromkeys(stages, last + 1)
        self._now = array("i", [0] * (len(stages) * len(ALLOCATIONS)))
        self._changed: dict[int, int] = {}
        kinds = {(action.stage, action.kind) for action in row if action.kind in {"B", "I"}}
        for stage, base in self._bases.items():
            self._set(base, "casts", max(1, sum(of == stage for of, _ in kinds)))

    def changes(self, row: Sequence[Instruction]) -> Iterator[AllocationCountChanges]:
        steps = self._run(row)
        for running in steps:
            before = self._take_changes()
            next(steps)
            yield AllocationCountChanges(before, running, self._take_changes())
        for base, counts in zip(self._bases.values(), optimizer_step_counts(len(self._bases)).tolist(), strict=True):
            for other, numbers in zip(self._bases.values(), counts, strict=True):
                for name, number in zip(ALLOCATIONS, numbers, strict=True):
                    self._set(other, name, 0 if name == "optimizer_step" else number)
            yield AllocationCountChanges(self._take_changes(), (base + _PLACE["optimizer_step"],), ())

    def distinct(self, row: Sequence[Instruction]) -> IntArray:
        # Points at which gradients are sent to other replicas (`message`) come last.
        during: dict[bytes, None] = {}
        message: dict[bytes, None] = {}
        steps, now = self._run(row), self._now
        for running in steps:
            for name, points in zip(running, (during, message), strict=False):
                now[name] = 1
                points[now.tobytes()] = None
                now[name] = 0
            next(steps)
        flat = np.frombuffer(b"".join((*during, *message)), now.typecode)
        return flat.reshape(-1, len(self._bases), len(ALLOCATIONS)).astype(np.int64)

    def _run(self, row: Sequence[Instruction]) -> Iterator[tuple[int, ...]]:
        for instruction in row:
            if instruction.do != "run":
                self._transfer(instruction)
                continue
            base = self._bases[instruction.stage]
            running: tuple[int, ...] = (base + _PLACE[self._begin(instruction)],)
            if instruction.kind in _MESSAGES:
                self._backwards_left[instruction.stage] -= 1
                if not self._backwards_left[instruction.stage]:
                    running = (*running, base + _PLACE[_MESSAGES[instruction.kind]])
            yield running
            self._end(instruction)
            yield ()

    def _take_changes(self) -> tuple[int, ...]:
        changed = tuple(number for change in self._changed.items() if change[1] for number in change)
        self._changed.clear()
        return changed

    def _count(self, base: int, name: AllocationName) -> int:
        return self._now[base + _PLACE[name]]

    def _add(self, base: int, name: AllocationName, number: int) -> None:
        place = base + _PLACE[name]
        self._now[place] += number
        self._changed[place] = self._changed.get(place, 0) + number

    def _set(self, base: int, name: AllocationName, count: int) -> None:
        if count != self._count(base, name):
            self._add(base, name, count - self._count(base, name))

    def _remove_if_present(self, base: int, name: AllocationName) -> None:
        # A tensor from a stage on the same device has no transfer buffer.
        if self._count(base, name):
            self._add(base, name, -1)

    def _transfer(self, instruction: Instruction) -> None:
        base = self._bases[instruction.stage]
        match instruction.do, instruction.kind:
            case "receive", "F":
                self._add(base, "input", 1)
            case "receive", "B":
                self._add(base, "output_gradient", 1)
            case "send", "B":
                for other in self._bases.values():
                    self._set(other, "input_gradient", int(other == base))

    def _begin(self, instruction: Instruction) -> AllocationName:
        base, is_last = self._bases[instruction.stage], instruction.micro_batch == self._last
        if instruction.kind == "F":
            self._remove_if_present(base, "input")
            return "last_forward" if is_last else "forward"
        if instruction.kind == "W":
            self._add(base, "weight_held", -1)
            return "weight_backward" if self._count(base, "gradients") else "first_weight_backward"
        self._remove_if_present(base, "output_gradient")
        self._add(base, "kept" if is_last else "held", -1)
        has_gradients = self._count(base, "gradients")
        if instruction.kind == "B":
            if not has_gradients:
                self._set(base, "input_backward_gradients", 0)
                return "first_backward"
            return "last_backward" if is_last else "backward"
        if not has_gradients and not self._count(base, "input_backward_gradients"):
            return "first_input_backward"
        return "last_input_backward" if is_last else "input_backward"

    def _end(self, instruction: Instruction) -> None:
        base = self._bases[instruction.stage]
        if instruction.kind == "F":
            self._add(base, "kept" if instruction.micro_batch == self._last else "held", 1)
            return
        if instruction.kind == "I":
            self._add(base, "weight_held", 1)
            self._set(base, "input_backward_gradients", 1 - self._count(base, "gradients"))
            return
        self._set(base, "gradients", 1)
        self._set(base, "input_backward_gradients", 0)


@lru_cache(maxsize=1024)
def peak_allocation_counts(actions: tuple[tuple[Action, ...], ...]) -> tuple[IntArray, ...]:
    """Return, for each device, the number of allocations of each kind at the points where its memory may peak.

    Shape of each array: (points, chunks, kinds of `ALLOCATIONS`). A point is left out if another point has at least as
    many allocations of every kind.
    """
    return tuple(starmap(_peak_allocation_counts, _programs(actions)))


def allocation_counts_at_points(actions: tuple[tuple[Action, ...], ...]) -> Iterator[IntArray]:
    """Yield, for each device, the number of allocations of each kind at all points in the step.

    Shape of each array: (points, chunks, kinds of `ALLOCATIONS`). Points with equal counts are listed once.
    """
    return starmap(_distinct_allocation_counts, _programs(actions))


@lru_cache(maxsize=64)
def _distinct_allocation_counts(row: tuple[Action, ...], program: tuple[Instruction, ...], last: int) -> IntArray:
    steps = optimizer_step_counts(len({action.stage for action in row}))
    return np.concatenate([_AllocationCounter(row, last).distinct(program), steps])


@lru_cache(maxsize=1024)
def _peak_allocation_counts(row: tuple[Action, ...], program: tuple[Instruction, ...], last: int) -> IntArray:
    return _undominated(_distinct_allocation_counts(row, program, last))


def optimizer_step_counts(chunks: int) -> IntArray:
    """Return the numbers of allocations during the optimizer's step, shape (updated chunks, chunks, allocations).

    Entry [u, c, p] is the number of allocations of kind p (an index into `ALLOCATIONS`) of chunk c, while chunk u is
    updated.
    """
    steps = np.zeros((chunks, chunks, len(ALLOCATIONS)), np.int64)
    steps[:, :, _PLACE["gradients"]] = 1
    steps[np.arange(chunks), np.arange(chunks), _PLACE["optimizer_step"]] = 1
    return steps


def _undominated(counts: IntArray) -> IntArray:
    # Sort by waiting micro-batches first, because a plan shows the first of several points with equal bytes.
    waiting = counts.copy()
    waiting[:, :, _PLACE["held"]] += counts[:, :, _PLACE["kept"]]
    # Bytes of big-endian numbers sort as the numbers do, and faster than rows of an array.
    rows = [row.tobytes() for row in waiting.reshape(len(counts), -1).astype(">i8")]
    firsts = {row: n for n, row in reversed(list(enumerate(rows)))}
    ordered = counts[[firsts[row] for row in sorted(firsts)]]
    flat = ordered.reshape(len(ordered), -1)
    columns = np.ascontiguousarray(flat[:, (flat != flat[0]).any(axis=0)].T, dtype=np.int32)
    # After sorting, only a later point can have at least as many of every allocation.
    size = max(1, _MOST_COMPARED // max(1, columns.size))
    dominated = []
    for start in range(0, len(flat), size):
        # Column by column is faster than a reduction over a short axis.
        is_later = np.arange(len(flat)) > np.arange(start, min(start + size, len(flat)))[:, None]
        for column in columns:
            is_later &= column >= column[start : start + size, None]
        dominated.append(is_later.any(axis=1))
    return ordered[~np.concatenate(dominated)]
