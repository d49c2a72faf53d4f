"""What all ranks did in the last steps as one trace, with the rows of a predicted one (`gpipe-plan show --trace`).

A process per rank, with a thread for what it computes and one for each direction that it sends in. What a rank
received stands between its forwards and backwards from when the sender had it ready and the receiver nothing else to
do, and on the sender's row at the same time; before that the receiver is idle.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from planner.core.values.trace_events import TraceEvent, named, trace_slice, trace_text
from planner.executor.measure.run_times import RunSpan, Transfer, waits_of
from planner.executor.measure.run_waits import ProcessRun

__all__ = ["trace_json"]

_THREADS = ("compute", "send forward", "send backward")


def trace_json(runs: Sequence[ProcessRun], title: str) -> str:
    """The trace of what every process did; its clock begins with the first step of them."""
    begin_ns = min((span.start_ns for run in runs for step in run.steps for span in step.spans), default=0)
    count = max((span.stage + 1 for run in runs for step in run.steps for span in step.spans), default=1)
    per_pipeline = len({run.rank for run in runs}) // len({run.replica for run in runs} or {0})
    trace = _Trace(begin_ns, chunks=count > per_pipeline, devices=per_pipeline)
    events = chain(_names(runs), *(trace.step(number, runs) for number in _numbers(runs)))
    return trace_text(events, title=title, what="measured by gpipe-plan's executor")


class _Trace:
    def __init__(self, begin_ns: int, *, chunks: bool, devices: int) -> None:
        self._begin_ns = begin_ns
        self._chunks = chunks
        self._devices = devices

    def step(self, number: int, runs: Sequence[ProcessRun]) -> Iterator[TraceEvent]:
        """One step of every pipeline."""
        for replica in sorted({run.replica for run in runs}):
            rows = {run.rank: _spans(run, number) for run in runs if run.replica == replica}
            for rank, spans in rows.items():
                for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
                    yield self._computed(span, rank, number)
            # While one rank begins a step, another may still be at the end of the one before.
            free_ns = {run.rank: max((s.end_ns for s in _spans(run, number - 1)), default=0) for run in runs}
            for transfer in waits_of(rows).transfers:
                felt = transfer._replace(start_ns=max(transfer.start_ns, free_ns[transfer.receiver]))
                if felt.end_ns > felt.start_ns:
                    yield from self._moved(felt, number)

    def _computed(self, span: RunSpan, rank: int, step: int) -> TraceEvent:
        args: dict[str, object] = {"step": step, "stage": span.stage}
        name = {"optimizer": "optimizer step", "recompute": "recompute"}.get(span.kind, "")
        if span.kind != "optimizer":
            args["micro_batch"] = span.micro_batch
        if not name:
            name = f"{span.kind[0].upper()}{self._number(span.micro_batch, span.stage)}"
        return trace_slice(name, span.kind, (rank, 0), self._when_us(span.start_ns, span.end_ns), args)

    def _moved(self, transfer: Transfer, step: int) -> Iterator[TraceEvent]:
        args: dict[str, object] = {"step": step, "stage": transfer.stage, "micro_batch": transfer.micro_batch}
        number = self._number(transfer.micro_batch, transfer.stage)
        when_us = self._when_us(transfer.start_ns, transfer.end_ns)
        yield trace_slice(f"receive {number}", "receive", (transfer.receiver, 0), when_us, args)
        thread = 1 if transfer.kind == "forward" else 2
        sender = transfer.stage - 1 if thread == 1 else transfer.stage + 1
        name = f"send {transfer.kind[0].upper()} {self._number(transfer.micro_batch, sender)}"
        yield trace_slice(name, _THREADS[thread], (transfer.sender, thread), when_us, {**args, "stage": sender})

    def _number(self, micro_batch: int, stage: int) -> str:
        return f"{micro_batch}.{stage // self._devices}" if self._chunks else str(micro_batch)

    def _when_us(self, start_ns: int, end_ns: int) -> tuple[float, float]:
        return (start_ns - self._begin_ns) / 1e3, (end_ns - self._begin_ns) / 1e3


# Private functions


def _names(runs: Iterable[ProcessRun]) -> Iterator[TraceEvent]:
    for run in runs:
        yield named("process_name", run.rank, 0, f"rank {run.rank}")
        yield named("process_sort_index", run.rank, 0, run.rank)
        for thread, name in enumerate(_THREADS):
            yield named("thread_name", run.rank, thread, name)


def _numbers(runs: Iterable[ProcessRun]) -> list[int]:
    return sorted({step.number for run in runs for step in run.steps})


def _spans(run: ProcessRun, number: int) -> tuple[RunSpan, ...]:
    return next((step.spans for step in run.steps if step.number == number), ())
