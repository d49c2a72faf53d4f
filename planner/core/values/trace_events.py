"""The format of traces that Perfetto (ui.perfetto.dev) and chrome://tracing open.

"Trace Event Format" (Google, 2016): events with times in microseconds, a process for each device, threads in it.
"""

import json
from collections.abc import Iterable

__all__ = ["TraceEvent", "counter", "named", "trace_slice", "trace_text"]

TraceEvent = dict[str, object]


def named(kind: str, process: int, thread: int, value: str | int) -> TraceEvent:
    """A name (`process_name`, `thread_name`) or place (`process_sort_index`) of a row."""
    key = "name" if isinstance(value, str) else "sort_index"
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {key: value}}


def trace_slice(
    name: str, kind: str, row: tuple[int, int], when_us: tuple[float, float], args: dict[str, object]
) -> TraceEvent:
    """Something that took time, in the row of a process and thread."""
    # Both ends are rounded, not the duration: what touches still touches, and what lies within still does.
    start, end = (round(time_us, 3) for time_us in when_us)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": row[0],
        "tid": row[1],
        "args": args,
    }


def counter(name: str, process: int, time_us: float, args: dict[str, object]) -> TraceEvent:
    """A quantity from a time on."""
    return {"name": name, "ph": "C", "ts": round(time_us, 3), "pid": process, "args": args}


def trace_text(events: Iterable[TraceEvent], *, title: str, what: str) -> str:
    """The file; one event per line."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    other = json.dumps({"title": title, "what": what})
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{lines}\n]}}\n'
