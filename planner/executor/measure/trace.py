"""Trace of the last steps of all ranks, in the format of a predicted trace (`gpipe-plan show --trace`).

Each rank is a process in the trace. A transfer is drawn twice, with the same begin and end: between the receiver's
actions, and on the sender's row. It begins when the sender has the tensors ready and the receiver is idle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.executor.measure.run_times import ProcessRun, RunSpan, Transfer, find_waits
from planner.files.trace import TraceSlice, trace_text


def measured_trace_json(runs: Sequence[ProcessRun], title: str) -> str:
    """Return the trace of all processes as JSON text. Time 0 is the start of the first recorded action."""
    begin_ns = min((span.start_ns for run in runs for step in run.steps for span in step.spans), default=0)
    num_stages = max((span.stage + 1 for run in runs for step in run.steps for span in step.spans), default=1)
    num_devices = len({run.rank for run in runs}) // len({run.replica for run in runs} or {0})
    trace = _SliceMaker(begin_ns=begin_ns, num_devices=num_devices, has_chunks=num_stages > num_devices)
    numbers = sorted({step.number for run in runs for step in run.steps})
    return trace_text(
        {run.rank: f"rank {run.rank}" for run in runs},
        (entry for number in numbers for entry in trace.slices_of_step(number, runs)),
        title=title,
        description="measured by gpipe-plan's executor",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceMaker:
    """Maker of the trace's slices: actions and transfers, each with its begin and end."""

    begin_ns: int
    num_devices: int
    """Number of devices of one pipeline."""
    has_chunks: bool

    def slices_of_step(self, number: int, runs: Sequence[ProcessRun]) -> Iterator[TraceSlice]:
        for replica in sorted({run.replica for run in runs}):
            rows = {run.rank: _spans(run, number) for run in runs if run.replica == replica}
            for rank, spans in rows.items():
                for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
                    yield self._slice(span.kind, rank, span, number)
            # While one rank begins a step, another may still be at the end of the previous one.
            free_ns = {run.rank: max((s.end_ns for s in _spans(run, number - 1)), default=0) for run in runs}
            for transfer in find_waits(rows).transfers:
                felt = transfer._replace(start_ns=max(transfer.start_ns, free_ns[transfer.receiver]))
                if felt.end_ns > felt.start_ns:
                    yield from self._moved(felt, number)

    def _moved(self, transfer: Transfer, step: int) -> Iterator[TraceSlice]:
        forward = transfer.kind == "forward"
        sent = transfer._replace(stage=transfer.stage + (-1 if forward else 1))
        yield self._slice("receive", transfer.receiver, transfer, step)
        yield self._slice("send forward" if forward else "send backward", transfer.sender, sent, step)

    def _slice(self, kind: str, rank: int, span: RunSpan | Transfer, step: int) -> TraceSlice:
        args, number = {"step": step, "stage": span.stage}, ""
        if kind != "optimizer":
            args["micro_batch"] = span.micro_batch
        if kind not in ("optimizer", "recompute"):
            chunk = f".{span.stage // self.num_devices}" if self.has_chunks else ""
            number = f"{span.micro_batch}{chunk}"
        return TraceSlice(
            kind=kind,
            process=rank,
            micro_batch=number,
            start_us=(span.start_ns - self.begin_ns) / 1e3,
            end_us=(span.end_ns - self.begin_ns) / 1e3,
            args=args,
        )


def _spans(run: ProcessRun, number: int) -> tuple[RunSpan, ...]:
    return next((step.spans for step in run.steps if step.number == number), ())
