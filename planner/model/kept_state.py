"""Find state that a model keeps from one forward to the next, and the part of a forward that uses it.

Each stage has a separate copy of the state, changed only by its own forwards. So code that changes state and code that
reads it must be in the same stage:

    forward of block 0      reads w           first access
    ------------------                        a stage that ends here would read a `w` that is never changed
    forward of block 3      changes w         last access

Tensors that are written in place are found in one forward. Tensors that are assigned to attributes (`self.h = h`) are
state if the next forward reads them, which a second recording shows. Numbers in attributes are ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.model.attributes import AttributeChange
from planner.model.recording import END, KeptState, Recording

Key = tuple[str, tuple[Any, ...]]
"""Path of a module, and the keys from its attributes to a value."""


def key_of(change: AttributeChange) -> Key:
    """Return a key that identifies the changed attribute."""
    return change.path, change.keys


def written_states(recording: Recording, names: Mapping[int, str], assigned: Mapping[int, str]) -> list[KeptState]:
    """Return the state that operators write, or that other tensors replaced.

    Args:
        recording: One forward.
        names: By storage, the name of each tensor that was there before the forward and is there after it.
        assigned: Path of the module of each replaced buffer, by the buffer's old storage.
    """
    flow = recording.flow.nodes
    times: dict[int, list[int]] = {}
    changed = set(assigned)
    for operator, reads in zip(recording.operators, recording.reads, strict=True):
        written = {flow[version]["storage"] for version in operator.writes}
        changed |= written
        for storage in written.union(flow[version]["storage"] for version in reads):
            times.setdefault(storage, []).append(operator.time)
    for storage, path in assigned.items():
        # The exact time is unknown; it is at the latest the end of the module's last call.
        ends = [call.exit for call in recording.calls if call.path == path]
        times.setdefault(storage, []).append(max(ends, default=END))
    return [
        KeptState(
            name=names[storage],
            storage=storage,
            first=min(times[storage]),
            last=max(times[storage]),
            is_replaced=storage in assigned,
        )
        for storage in sorted(changed & names.keys() & times.keys())
    ]


@dataclass(frozen=True, kw_only=True)
class Rereads:
    """Uses, in a second forward, of the tensors that the first forward left in attributes."""

    recording: Recording
    storages: Mapping[Key, frozenset[int]]
    """Storages of those tensors in the second recording, by attribute."""
    fixed: frozenset[Key]
    """Attributes whose tensors depend on nothing that differs between stages or forwards, such as cached tables."""


def attribute_states(first: Recording, second: Rereads) -> list[KeptState]:
    """Return the attributes that a forward sets to tensors and a later forward reads."""
    flow, again = second.recording.flow.nodes, second.recording
    is_same = [call.exit for call in first.calls] == [call.exit for call in again.calls]
    set_again = set(map(key_of, again.calls[0].changes))
    found = []
    for key, storages in second.storages.items():
        reading = [
            operator
            for operator, reads in zip(again.operators, again.reads, strict=True)
            if any(flow[version]["storage"] in storages for version in reads)
        ]
        if not reading or (key in second.fixed and key not in set_again):
            continue
        if len(first.calls) != len(again.calls):  # it is unknown which calls of the first recording read it
            span = (0, END)
        else:
            setting = _innermost(first, key)
            calls = [first.calls[number] for number in {*setting, *(operator.call for operator in reading)}]
            enters = [operator.time for operator in reading] if is_same else [call.enter for call in calls]
            span = (min(enters), max(call.exit for call in calls))
        name = ".".join(filter(None, [key[0], *map(str, key[1])]))
        found.append(KeptState(name=name, storage=-1, first=span[0], last=span[1], attribute=key))
    return found


def separated(states: Iterable[KeptState], cut: int) -> str:
    """Return why the model cannot be cut at a time, or an empty text."""
    for state in states:
        if state.first < cut <= state.last:
            return f'forward changes "{state.name}", which code before and after it uses (let one block alone use it)'
    return ""


def _innermost(recording: Recording, key: Key) -> list[int]:
    """Return the numbers of the calls whose own code set an attribute."""
    setting = {call.number for call in recording.calls if key in map(key_of, call.changes)}
    return [number for number in setting if setting.isdisjoint(recording.calls[number].children)]
