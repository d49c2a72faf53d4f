"""Trace of a predicted step, for a trace viewer.

Each device is a process of the trace, with a counter `memory`, as in the trace of a run (`train.py --trace`).
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.files.trace import TRACE_THREADS, TraceMemory, TraceSlice, trace_text
from planner.show.step import Span, StepTimeline
from planner.show.views.numbers import row_noun
from planner.show.views.spans import micro_batch_text


def predicted_trace_json(step: StepTimeline, title: str) -> str:
    """Return the trace of a predicted step as JSON."""
    kinds = {"compute", *(span.kind for span in step.spans)}
    return trace_text(
        {device: f"{row_noun(step.chunks)} {device}" for device in range(step.num_devices)},
        (entry for span in step.spans for entry in _slices(span, step)),
        (TraceMemory(device, *level) for device, levels in enumerate(step.memory) for level in levels),
        threads=[thread for thread in TRACE_THREADS if thread in kinds],
        title=title,
        description="predicted by gpipe-plan, one training step",
    )


def _slices(span: Span, step: StepTimeline) -> Iterator[TraceSlice]:
    args, number = {"stage": span.stage}, ""
    if step.chunks > 1:
        args["chunk"] = span.stage // step.num_devices
    if span.kind != "optimizer":
        args["micro_batch"] = span.micro_batch
        number = micro_batch_text(span, step)
    whole = TraceSlice(
        kind=span.kind,
        process=span.device,
        micro_batch=number,
        start_us=span.start_us,
        end_us=span.end_us,
        args=args,
    )
    yield whole
    if span.recompute_us > 0:
        yield replace(whole, kind="recompute", micro_batch="", end_us=span.start_us + span.recompute_us)
