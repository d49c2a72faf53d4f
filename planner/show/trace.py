"""One predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per device, with a thread for what it computes and one for each direction that it sends in. Recomputation
lies within its backward. The counter `memory` is the predicted memory of the device; its highest value is its peak.
A run's trace (`train.py --trace`) has the same rows.
"""

from collections.abc import Iterator

from planner.core.cost.step import Span, Step
from planner.core.values.trace_events import TraceEvent, counter, named, trace_slice, trace_text
from planner.show.svg import row_name

__all__ = ["trace_json"]

_THREADS = {"send forward": 1, "send backward": 2}
_NAMES = ("compute", "send forward", "send backward")
_WORDS = {"forward": "F", "backward": "B", "receive": "receive", "send forward": "send F", "send backward": "send B"}


def trace_json(step: Step, title: str) -> str:
    """The trace of `step`; one event per line."""
    events = [*_names(step), *(entry for span in step.spans for entry in _slices(span, step)), *_counters(step)]
    return trace_text(events, title=title, what="predicted by gpipe-plan, one training step")


def _names(step: Step) -> Iterator[TraceEvent]:
    sends = {span.kind for span in step.spans} & set(_THREADS)
    for device in range(step.num_devices):
        yield named("process_name", device, 0, f"{row_name(step)} {device}")
        yield named("process_sort_index", device, 0, device)
        for thread, name in enumerate(_NAMES):
            if name == "compute" or name in sends:
                yield named("thread_name", device, thread, name)


def _slices(span: Span, step: Step) -> Iterator[TraceEvent]:
    chunk = span.stage // step.num_devices
    args: dict[str, object] = {"stage": span.stage}
    if step.chunks > 1:
        args["chunk"] = chunk
    if span.kind == "optimizer":
        yield _slice("optimizer step", span, span.start_us, span.end_us, args)
        return
    args["micro_batch"] = span.micro_batch
    number = f"{span.micro_batch}.{chunk}" if step.chunks > 1 else str(span.micro_batch)
    word = _WORDS[span.kind]
    yield _slice(f"{word}{number}" if len(word) == 1 else f"{word} {number}", span, span.start_us, span.end_us, args)
    if span.recompute_us > 0:
        yield _slice("recompute", span, span.start_us, span.start_us + span.recompute_us, args)


def _slice(name: str, span: Span, start_us: float, end_us: float, args: dict[str, object]) -> TraceEvent:
    kind = span.kind if name != "recompute" else "recompute"
    return trace_slice(name, kind, (span.device, _THREADS.get(span.kind, 0)), (start_us, end_us), args)


def _counters(step: Step) -> Iterator[TraceEvent]:
    for device, levels in enumerate(step.memory):
        for level in levels:
            yield counter("memory", device, level.start_us, {"bytes": level.bytes})
