"""Attribute the time of a training step to stages and boundaries, from the recorded actions of every process.

If the input of an action comes from another process, the gap before the action is idle time until the sender had the
input ready. The rest of the gap is the transfer, which includes the executor's overhead. A gap before an action that
receives nothing is overhead.

    sender      | ... action |
    receiver    | action |        | action
                         |--idle--|transfer|

Means are over the middle half of the steps, sorted by duration, because other programs may disturb the slowest steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import fmean, mean, median
from typing import Final, Literal, NamedTuple, TypeVar

from planner.core.schedule import KINDS, ActionKind, Label, MessageKind
from planner.core.schedule.kinds import WEIGHT_BACKWARD
from planner.core.values.run_report import BoundaryRun, RunReport, StageRun

RunSpanKind = Label | Literal["recompute", "optimizer"]
Item = TypeVar("Item")


class RunSpan(NamedTuple):
    """Time span of an action. The span of a backward or input-gradient pass contains the span of its recomputation."""

    kind: RunSpanKind
    stage: int
    """Stage of the action; for an optimizer's step, the process's first stage."""
    micro_batch: int
    start_ns: int
    end_ns: int


class RunStep(NamedTuple):
    """Recorded actions of one process in one step."""

    number: int
    spans: tuple[RunSpan, ...]


class ProcessRun(NamedTuple):
    """Recorded steps of one process."""

    rank: int
    replica: int
    steps: tuple[RunStep, ...]


class Transfer(NamedTuple):
    """Transfer of a micro-batch's tensors over a boundary, as the receiver saw it."""

    kind: RunSpanKind
    """`forward`: outputs to the next stage; `backward`: gradients to the previous stage."""
    stage: int
    """Receiving stage."""
    micro_batch: int
    sender: int
    """Rank of the sending process."""
    receiver: int
    """Rank of the receiving process."""
    start_ns: int
    """Time from which the tensors were ready and the receiver was idle."""
    end_ns: int
    """Time at which the receiver began to use the tensors."""
    is_waited_for: bool
    """True if the receiver already waited when the sender had the tensors ready."""

    @property
    def boundary(self) -> int:
        """Index of the stage before the boundary."""
        return min(self.stage, _source_stage(self.kind, self.stage))


@dataclass(frozen=True, kw_only=True)
class StepWaits:
    """Idle times, transfers and overhead of a pipeline's processes in one step."""

    window_ns: int
    """Length of the analyzed period, which is the same for all processes."""
    begins_ns: Mapping[int, int]
    """Start of the analyzed period, by rank."""
    idle_ns: Mapping[int, int]
    """Time that each process waited for tensors that were not ready, by rank."""
    transfers: tuple[Transfer, ...]
    overhead_ns: tuple[int, ...]
    """Executor's own time before every action of the step that received nothing, over all processes."""

    def bubble(self, overhead_ns: float = 0.0) -> float:
        """Return the share of idle and transfer time in the step. `overhead_ns` is subtracted from each transfer."""
        within = (t for t in self.transfers if t.start_ns >= self.begins_ns[t.receiver])
        moved = sum(max(0.0, t.end_ns - t.start_ns - overhead_ns) for t in within)
        waited = sum(self.idle_ns.values()) + moved
        return waited / (len(self.idle_ns) * self.window_ns) if self.window_ns else 0.0


def find_waits(processes: Mapping[int, Iterable[RunSpan]]) -> StepWaits:
    """Return idle times, transfers and overhead in one step, from the actions of every rank on one clock."""
    rows = {
        rank: sorted((s for s in spans if s.kind in _KINDS), key=lambda s: s.start_ns)
        for rank, spans in processes.items()
    }
    ready = {(_flow(s), s.stage, s.micro_batch): (rank, s.end_ns) for rank, row in rows.items() for s in row}
    overlap = any(span.kind == WEIGHT_BACKWARD.label for row in rows.values() for span in row)
    begins_ns, window_ns = _process_windows(rows, overlap=overlap)
    idle_ns = dict.fromkeys(rows, 0)
    transfers: list[Transfer] = []
    overhead_ns: list[int] = []
    for rank, row in rows.items():
        begin_ns = free_ns = begins_ns[rank]
        for span in row:
            message_kind = _flow(span)
            sender, ready_ns = ready.get(
                (message_kind, _source_stage(span.kind, span.stage), span.micro_batch), (rank, 0)
            )
            if sender != rank and message_kind is not None:
                # Before its first action, a process sees the whole transfer. Separate windows do not include it.
                free_ns = min(ready_ns, free_ns) if overlap and span is row[0] else free_ns
                there_ns = min(max(ready_ns, free_ns), span.start_ns)
                idle_ns[rank] += max(0, there_ns - max(free_ns, begin_ns))
                crossing = there_ns, span.start_ns, ready_ns >= free_ns
                direction = KINDS[message_kind].label
                transfers.append(Transfer(direction, span.stage, span.micro_batch, sender, rank, *crossing))
            elif free_ns > begin_ns:
                overhead_ns.append(span.start_ns - free_ns)
            else:
                idle_ns[rank] += span.start_ns - free_ns
            free_ns = span.end_ns
        idle_ns[rank] += begin_ns + window_ns - free_ns
    return StepWaits(
        window_ns=window_ns,
        begins_ns=begins_ns,
        idle_ns=idle_ns,
        transfers=tuple(transfers),
        overhead_ns=tuple(overhead_ns),
    )


@dataclass(frozen=True, kw_only=True)
class MeanWaits:
    """Mean times in which the processes of a pipeline do not compute."""

    bubble: float
    """Idle times and transfers, without the executor's overhead, as a share of the time of all processes."""
    overhead_us: float | None
    """Executor's own time per action; None if unknown."""
    idle_us: Mapping[int, float]
    """Idle time per step, by rank."""
    transfer_us: Mapping[int, float]
    """Time of received transfers per step, by receiving stage."""
    crossing_us: Mapping[tuple[RunSpanKind, int], float]
    """Time of one transfer, by direction (`forward` or `backward`) and by the stage before the boundary."""


def mean_waits(processes: Mapping[int, Iterable[RunStep]], *, overlaps: bool) -> MeanWaits | None:
    """Return the mean times in which processes do not compute; None if no step was recorded by all processes.

    `processes` has the steps of each process, by rank, on the same clock. `overlaps` is true if transfers overlap with
    computation.
    """
    by_step: dict[int, dict[int, Iterable[RunSpan]]] = {}
    for rank, steps in processes.items():
        for step in steps:
            by_step.setdefault(step.number, {})[rank] = step.spans
    waits = [find_waits(rows) for rows in by_step.values() if len(rows) == len(processes)]
    waits = _middle_half((wait.window_ns, wait) for wait in waits)
    if not waits:
        return None
    overheads = [time for wait in waits for time in wait.overhead_ns]
    overhead_ns = fmean(overheads) if overheads else 0.0
    stages = {transfer.stage for wait in waits for transfer in wait.transfers}
    return MeanWaits(
        bubble=fmean(wait.bubble(overhead_ns) for wait in waits),
        overhead_us=overhead_ns / 1e3 if overheads else None,
        idle_us={rank: fmean(wait.idle_ns[rank] for wait in waits) / 1e3 for rank in processes},
        transfer_us={stage: fmean(_received_ns(wait, stage) for wait in waits) / 1e3 for stage in stages},
        crossing_us=_crossings([t for wait in waits for t in wait.transfers], overlaps=overlaps),
    )


def with_waits(report: RunReport, runs: Sequence[ProcessRun], *, overlaps: bool) -> RunReport:
    """Add bubble, idle times, transfers and overhead, measured after the warm-up, to a run report.

    Args:
        report: Report of the run without these times.
        runs: Recordings of all processes, on the same clock.
        overlaps: True if transfers overlap with computation.
    """
    waiting: dict[int, MeanWaits] = {}
    for replica in sorted({run.replica for run in runs}):
        pipeline = [run for run in runs if run.replica == replica]
        steps = {run.rank: [step for step in run.steps if step.number >= report.warmup_steps] for run in pipeline}
        of_replica = mean_waits(steps, overlaps=overlaps)
        if of_replica is not None:
            waiting[replica] = of_replica
    overheads = [w.overhead_us for w in waiting.values() if w.overhead_us is not None]
    ranks = {(run.replica, span.stage): run.rank for run in runs for step in run.steps for span in step.spans}
    return replace(
        report,
        stages=tuple(
            _with_waiting(s, waiting.get(s.replica), ranks.get((s.replica, s.index), 0)) for s in report.stages
        ),
        boundaries=tuple(boundary for replica, w in waiting.items() for boundary in _boundaries(replica, w)),
        bubble=mean(w.bubble for w in waiting.values()) if waiting else None,
        overhead_us=round(mean(overheads), 1) if overheads else None,
    )


def typical_action_us(steps: Iterable[Sequence[RunSpan]], kind: RunSpanKind, stage: int) -> float:
    """Return the typical time of an action of one micro-batch on a stage, in microseconds.

    The time of a micro-batch is the mean over the middle half of the steps, sorted by duration. The typical time is the
    median over the micro-batches.

    Args:
        steps: Actions of each step.
        kind: Kind of the action. For `backward`, I and W of a micro-batch are added. For `recompute`, micro-batches
            without recomputation count as 0.
        stage: Index of the stage.

    Returns:
        The typical time; 0 if no such action was recorded.
    """
    kinds = _BACKWARDS if kind == "backward" else {kind}
    taken: dict[int, list[int]] = {}
    for spans in _middle_half((_window_ns(spans), spans) for spans in steps):
        of_step: dict[int, int] = {}
        for span in spans:
            if span.stage != stage or span.kind not in kinds | _BACKWARDS:
                continue
            took_ns = span.end_ns - span.start_ns if span.kind in kinds else 0
            if took_ns or kind == "recompute":
                of_step[span.micro_batch] = of_step.get(span.micro_batch, 0) + took_ns
        for micro_batch, took_ns in of_step.items():
            taken.setdefault(micro_batch, []).append(took_ns)
    return median(fmean(times_ns) for times_ns in taken.values()) / 1e3 if taken else 0.0


def _with_waiting(stage: StageRun, waiting: MeanWaits | None, rank: int) -> StageRun:
    if waiting is None:
        return stage
    transfer_us, idle_us = waiting.transfer_us.get(stage.index, 0.0), waiting.idle_us.get(rank, 0.0)
    return replace(stage, transfer_us=round(transfer_us, 1), idle_us=round(idle_us, 1))


def _boundaries(replica: int, waiting: MeanWaits) -> Iterator[BoundaryRun]:
    for index in sorted({boundary for _, boundary in waiting.crossing_us}):
        forward_us = round(waiting.crossing_us.get(("forward", index), 0.0), 1)
        backward_us = round(waiting.crossing_us.get(("backward", index), 0.0), 1)
        yield BoundaryRun(index=index, replica=replica, forward_us=forward_us, backward_us=backward_us)


def _received_ns(wait: StepWaits, stage: int) -> int:
    return sum(t.end_ns - t.start_ns for t in wait.transfers if t.stage == stage)


def _crossings(transfers: Iterable[Transfer], *, overlaps: bool) -> dict[tuple[RunSpanKind, int], float]:
    groups: dict[tuple[RunSpanKind, int], list[Transfer]] = {}
    for transfer in transfers:
        groups.setdefault((transfer.kind, transfer.boundary), []).append(transfer)
    crossings = {}
    for place, group in groups.items():
        # If transfers overlap with computation, only the receiver's waiting shows the time of a whole transfer.
        whole = [t for t in group if t.is_waited_for] if overlaps else group
        crossings[place] = fmean(t.end_ns - t.start_ns for t in whole or group) / 1e3
    return crossings


def _process_windows(rows: Mapping[int, Sequence[RunSpan]], *, overlap: bool) -> tuple[dict[int, int], int]:
    spans = [span for row in rows.values() for span in row]
    if overlap:  # with split backwards, a process may begin a step earlier than others
        begins_ns = {rank: row[0].start_ns if row else 0 for rank, row in rows.items()}
        return begins_ns, max(row[-1].end_ns - row[0].start_ns for row in rows.values() if row)
    first_ns = min((span.start_ns for span in spans), default=0)
    return dict.fromkeys(rows, first_ns), max((span.end_ns for span in spans), default=0) - first_ns


def _middle_half(steps: Iterable[tuple[int, Item]]) -> list[Item]:
    ordered = [item for _, item in sorted(steps, key=itemgetter(0))]
    left_out = (len(ordered) + 1) // 4
    return ordered[left_out : len(ordered) - left_out]


def _window_ns(spans: Sequence[RunSpan]) -> int:
    return max((span.end_ns for span in spans), default=0) - min((span.start_ns for span in spans), default=0)


def _flow(span: RunSpan) -> MessageKind | None:
    return _KINDS[span.kind].message_kind


def _source_stage(kind: RunSpanKind, stage: int) -> int:
    return stage - _KINDS[kind].direction


_KINDS: Final[Mapping[str, ActionKind]] = {kind.label: kind for kind in KINDS.values()}
_BACKWARDS: Final = frozenset(kind.label for kind in KINDS.values() if kind.follows is not None)
"""Labels of the backward kinds B, I and W."""
