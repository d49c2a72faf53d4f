"""One predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per device, with a thread for what it computes and one for each direction that it sends in. Recomputation
lies within its backward. The counter `memory` is the predicted memory of the device; its highest value is its peak.

Format: "Trace Event Format" (Google, 2016), times in microseconds.
"""

import json
from collections.abc import Iterator

from planner.core.step import Span, Step
from planner.show.svg import row_name

__all__ = ["trace_json"]

_THREADS = {"send forward": 1, "send backward": 2}
_NAMES = ("compute", "send forward", "send backward")
_WORDS = {"forward": "F", "backward": "B", "receive": "receive", "send forward": "send F", "send backward": "send B"}

_Entry = dict[str, object]


def trace_json(step: Step, title: str) -> str:
    """The trace of `step`; one event per line."""
    events = [*_names(step), *(entry for span in step.spans for entry in _slices(span, step)), *_counters(step)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    other = json.dumps({"title": title, "what": "predicted by gpipe-plan, one training step"})
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{lines}\n]}}\n'


def _names(step: Step) -> Iterator[_Entry]:
    sends = {span.kind for span in step.spans} & set(_THREADS)
    for device in range(step.num_devices):
        yield _meta("process_name", device, 0, {"name": f"{row_name(step)} {device}"})
        yield _meta("process_sort_index", device, 0, {"sort_index": device})
        for thread, name in enumerate(_NAMES):
            if name == "compute" or name in sends:
                yield _meta("thread_name", device, thread, {"name": name})


def _meta(name: str, device: int, thread: int, args: dict[str, object]) -> _Entry:
    return {"name": name, "ph": "M", "pid": device, "tid": thread, "args": args}


def _slices(span: Span, step: Step) -> Iterator[_Entry]:
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


def _slice(name: str, span: Span, start_us: float, end_us: float, args: dict[str, object]) -> _Entry:
    # Both ends are rounded, not the duration: what touches still touches, and what lies within still does.
    start, end = round(start_us, 3), round(end_us, 3)
    thread = _THREADS.get(span.kind, 0)
    return {
        "name": name,
        "cat": span.kind if name != "recompute" else "recompute",
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": span.device,
        "tid": thread,
        "args": args,
    }


def _counters(step: Step) -> Iterator[_Entry]:
    for device, levels in enumerate(step.memory):
        for level in levels:
            held = {"bytes": level.bytes}
            yield {"name": "memory", "ph": "C", "ts": round(level.start_us, 3), "pid": device, "args": held}
