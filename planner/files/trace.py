"""The one writer of traces that Perfetto (ui.perfetto.dev) and chrome://tracing open: of a predicted step, of a run.

"Trace Event Format" (Google, 2016): events with times in microseconds, a process for each device, and in it a thread
for what the device computes and one for each direction that it sends in. Recomputation lies within its backward.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from planner.core.schedule.kinds import KINDS

TRACE_THREADS: Final = ("compute", "send forward", "send backward")
"""Threads of a process by their number; a slice whose kind is none of these is computed."""

_NAMES: Final[Mapping[str, str]] = {
    **{kind.label: kind.letter for kind in KINDS.values()},
    **{f"send {kind.label}": f"send {kind.letter} " for kind in KINDS.values()},
    "receive": "receive ",
    "recompute": "recompute",
    "optimizer": "optimizer step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSlice:
    """Something that took a process some time."""

    kind: str
    """What devices compute, or send, by the label of its kind; or `receive`, `recompute`, `optimizer`."""
    process: int
    micro_batch: str = ""
    """Its number; `3.1` on chunk 1 of a device that has several; empty where the name needs none."""
    start_us: float
    end_us: float
    args: Mapping[str, int]
    """What a viewer tells of the slice that is chosen."""


class TraceLevel(NamedTuple):
    """The memory that a process holds from a time on."""

    process: int
    start_us: float
    bytes: int


def trace_text(
    processes: Mapping[int, str],
    slices: Iterable[TraceSlice],
    levels: Iterable[TraceLevel] = (),
    *,
    threads: Sequence[str] = TRACE_THREADS,
    title: str,
    what: str,
) -> str:
    """The file; one event per line.

    Args:
        processes: The name of each process, by its number, which also is its place from the top.
        slices: What the processes did. Those of one thread must lie apart or one within the other.
        levels: What they held, by time.
        threads: Those of `TRACE_THREADS` that have slices.
        title: Of the trace.
        what: Who made it, and of what.
    """
    counters = (
        {"name": "memory", "ph": "C", "ts": round(time_us, 3), "pid": process, "args": {"bytes": held}}
        for process, time_us, held in levels
    )
    events = [*_rows(processes, threads), *map(_slice, slices), *counters]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    other = json.dumps({"title": title, "what": what})
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{lines}\n]}}\n'


_Event = dict[str, object]


def _rows(processes: Mapping[int, str], threads: Sequence[str]) -> Iterator[_Event]:
    for process, name in processes.items():
        event = {"ph": "M", "pid": process}
        yield {"name": "process_name", **event, "tid": 0, "args": {"name": name}}
        yield {"name": "process_sort_index", **event, "tid": 0, "args": {"sort_index": process}}
        for number, thread in enumerate(TRACE_THREADS):
            if thread in threads:
                yield {"name": "thread_name", **event, "tid": number, "args": {"name": thread}}


def _slice(entry: TraceSlice) -> _Event:
    # Both ends are rounded, not the duration: what touches still touches, and what lies within still does.
    start_us, end_us = round(entry.start_us, 3), round(entry.end_us, 3)
    return {
        "name": f"{_NAMES[entry.kind]}{entry.micro_batch}",
        "cat": entry.kind,
        "ph": "X",
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "pid": entry.process,
        "tid": TRACE_THREADS.index(entry.kind) if entry.kind in TRACE_THREADS else 0,
        "args": dict(entry.args),
    }
