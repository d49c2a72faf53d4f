"""What the processes of a run waited for, as a run report tells it: by stage and boundary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import NamedTuple

from planner.core.values.run_report import BoundaryRun, StageRun
from planner.executor.measure.run_times import RunSpanKind, RunStep, Waiting, waiting_of

__all__ = ["ProcessRun", "Waits"]


class ProcessRun(NamedTuple):
    """What one process did."""

    rank: int
    replica: int
    steps: tuple[RunStep, ...]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What the processes waited for, as a report tells it."""

    stages: tuple[StageRun, ...]
    boundaries: tuple[BoundaryRun, ...]
    bubble: float | None
    overhead_us: float | None

    @classmethod
    def of(cls, runs: Sequence[ProcessRun], stages: Sequence[StageRun], *, warm_up: int, overlaps: bool) -> "Waits":
        """Of all pipelines side by side.

        Args:
            runs: What every process did.
            stages: What is known of every stage; its waiting is added.
            warm_up: Steps that do not count.
            overlaps: Whether transfers go on while the receiver computes.
        """
        found: dict[int, Waiting] = {}
        for replica in {run.replica for run in runs}:
            mine = [run for run in runs if run.replica == replica]
            steps = {run.rank: [step for step in run.steps if step.number >= warm_up] for run in mine}
            waiting = waiting_of(steps, overlaps=overlaps)
            if waiting is not None:
                found[replica] = waiting
        overheads = [waiting.overhead_us for waiting in found.values() if waiting.overhead_us is not None]
        ranks = {(run.replica, span.stage): run.rank for run in runs for step in run.steps for span in step.spans}
        return cls(
            stages=tuple(_with_waiting(s, found.get(s.replica), ranks.get((s.replica, s.index), 0)) for s in stages),
            boundaries=tuple(b for replica, waiting in sorted(found.items()) for b in _boundaries(replica, waiting)),
            bubble=mean(w.bubble for w in found.values()) if found else None,
            overhead_us=round(mean(overheads), 1) if overheads else None,
        )


# Private functions


def _with_waiting(stage: StageRun, waiting: Waiting | None, rank: int) -> StageRun:
    if waiting is None:
        return stage
    transfer_us, idle_us = waiting.transfer_us.get(stage.index, 0.0), waiting.idle_us.get(rank, 0.0)
    return replace(stage, transfer_us=round(transfer_us, 1), idle_us=round(idle_us, 1))


def _boundaries(replica: int, waiting: Waiting) -> Iterator[BoundaryRun]:
    for index in sorted({boundary for _, boundary in waiting.crossing_us}):
        forward_us, backward_us = (waiting.crossing_us.get((kind, index), 0.0) for kind in _DIRECTIONS)
        yield BoundaryRun(
            index=index, replica=replica, forward_us=round(forward_us, 1), backward_us=round(backward_us, 1)
        )


_DIRECTIONS: tuple[RunSpanKind, ...] = ("forward", "backward")
