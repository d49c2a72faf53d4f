"""Write traces of a predicted step or of a run, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is the "Trace Event Format" (Google, 2016), with times in microseconds. Each device is a process of the
trace, with threads for computation, forward sends and backward sends.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from planner.core.schedule.kinds import KINDS

TRACE_THREADS: Final = ("compute", "send forward", "send backward")
"""Names of a process's threads, in order. Slices whose kind is not the name of a thread are in `compute`."""

_NAMES: Final[Mapping[str, str]] = {
    **{kind.label: kind.letter for kind in KINDS.values()},
    **{f"send {kind.label}": f"send {kind.letter} " for kind in KINDS.values()},
    "receive": "receive ",
    "recompute": "recompute",
    "optimizer": "optimizer step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSlice:
    """Interval of time in which a process runs an action, a transfer or an optimizer step."""

    kind: str
    """Label of an action (`forward`), or of the transfer of its result (`send forward`); or `receive`, `recompute`,
    `optimizer`."""
    process: int
    micro_batch: str = ""
    """Index of the micro-batch, or empty. `3.1` means micro-batch 3 on chunk 1 of a device with several chunks."""
    start_us: float
    end_us: float
    args: Mapping[str, int]
    """Details that a viewer shows for the selected slice."""


class TraceMemory(NamedTuple):
    """Memory of a process in bytes during an interval: from `start_us` to the start of the next `TraceMemory`."""

    process: int
    start_us: float
    bytes: int


def trace_text(
    processes: Mapping[int, str],
    slices: Iterable[TraceSlice],
    levels: Iterable[TraceMemory] = (),
    *,
    threads: Sequence[str] = TRACE_THREADS,
    title: str,
    description: str,
) -> str:
    """Return the text of a trace file, with one event per line.

    Args:
        processes: Name of each process by number; processes are drawn in the order of their numbers.
        slices: Slices of all processes. Slices of one thread must be disjoint or nested.
        levels: Memory of all processes, in order of time.
        threads: Threads to draw, some of `TRACE_THREADS`.
        title: Title of the trace.
        description: Origin of the trace.
    """
    counters = (
        {"name": "memory", "ph": "C", "ts": round(time_us, 3), "pid": process, "args": {"bytes": held}}
        for process, time_us, held in levels
    )
    events = [*_rows(processes, threads), *map(_slice, slices), *counters]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    other = json.dumps({"title": title, "what": description})
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
    # Start and end are rounded instead of the duration, so that slices stay adjacent or nested.
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
