"""Find state that one forward changes and the next forward reads, and the code that uses it.

Each stage has its own copy of the state, which only its own forwards change. So the code that changes a state and the
code that reads it must be in the same stage:

    forward of block 0      reads w           first access
    ------------------                        a stage that ends here would read a `w` that is never changed
    forward of block 3      changes w         last access

One recorded forward shows which tensors are written in place. A tensor that is assigned to an attribute (`self.h = h`)
is state only if the next forward reads it, which a second recording shows. Numbers in attributes are ignored, except
in modules that cache both constant tensors and numbers, such as a mask and its length (`reused_tables`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.model.attributes import AttributeChange
from planner.model.recording import END, CarriedState, Recording

AttributeKey = tuple[str, tuple[Any, ...]]
"""Path of a module, and the location of a value in it: name of the attribute, then keys in nested containers."""


def attribute_key(change: AttributeChange) -> AttributeKey:
    """Return a key that identifies the changed attribute."""
    return change.path, change.keys


def written_states(recording: Recording, names: Mapping[int, str], replaced: Mapping[int, str]) -> list[CarriedState]:
    """Return the tensors that a forward writes in place, and the buffers that it replaces.

    Args:
        recording: One forward.
        names: Names of the tensors that exist before and after the forward. Keys are storage numbers in `recording`.
        replaced: Paths of the modules whose buffers the forward replaced. Keys are the storage numbers of these buffers
            before the replacement.
    """
    flow = recording.flow.nodes
    times: dict[int, list[int]] = {}
    changed = set(replaced)
    for operator, reads in zip(recording.operators, recording.reads, strict=True):
        written = {flow[version]["storage"] for version in operator.writes}
        changed |= written
        for storage in written.union(flow[version]["storage"] for version in reads):
            times.setdefault(storage, []).append(operator.time)
    for storage, path in replaced.items():
        # The exact time of the replacement is unknown; the end of the module's last call is an upper bound.
        ends = [call.exit for call in recording.calls if call.path == path]
        times.setdefault(storage, []).append(max(ends, default=END))
    return [
        CarriedState(
            name=names[storage],
            storage=storage,
            first=min(times[storage]),
            last=max(times[storage]),
            is_replaced=storage in replaced,
        )
        for storage in sorted(changed & names.keys() & times.keys())
    ]


@dataclass(frozen=True, kw_only=True)
class SecondForward:
    """Recording of a model's second forward, to find attributes that the first forward sets and the second reads."""

    recording: Recording
    storages: Mapping[AttributeKey, frozenset[int]]
    """Storages of the tensors that the first forward left in each attribute, as storage numbers of `recording`."""
    fixed: frozenset[AttributeKey]
    """Attributes whose tensors every stage can compute itself, such as a mask that a module caches."""


def attribute_states(first: Recording, second: SecondForward) -> list[CarriedState]:
    """Return the attributes that one forward sets to tensors and the next forward reads."""
    flow, again = second.recording.flow.nodes, second.recording
    is_same = [call.exit for call in first.calls] == [call.exit for call in again.calls]
    set_again = set(map(attribute_key, again.calls[0].changes))
    states = []
    for key, storages in second.storages.items():
        reading = [
            operator
            for operator, reads in zip(again.operators, again.reads, strict=True)
            if any(flow[version]["storage"] in storages for version in reads)
        ]
        if not reading or (key in second.fixed and key not in set_again):
            continue
        if len(first.calls) != len(again.calls):  # the reading calls have no counterparts in the first recording
            span = (0, END)
        else:
            setting = _innermost(first, key)
            calls = [first.calls[number] for number in {*setting, *(operator.call for operator in reading)}]
            enters = [operator.time for operator in reading] if is_same else [call.enter for call in calls]
            span = (min(enters), max(call.exit for call in calls))
        name = ".".join(filter(None, [key[0], *map(str, key[1])]))
        states.append(CarriedState(name=name, storage=-1, first=span[0], last=span[1], attribute=key))
    return states


def reused_tables(first: Recording, second: SecondForward) -> dict[AttributeKey, int]:
    """Return the attributes that cache tables and numbers, and where in the recording `first` each is last set.

    A mask and its length are an example. The first forward sets a cached attribute, and the second does not set it
    again. A table is a tensor that depends on no parameter, floating-point input or random number. Modules that cache
    only tables or only numbers are left out.

    Returns:
        For each attribute, the position in `first` where the last call that sets the attribute ends.
    """
    set_again = set(map(attribute_key, second.recording.calls[0].changes))
    once = {attribute_key(change): change for change in first.calls[0].changes}
    numbers = {key for key, change in once.items() if not change.contains_tensor and key not in set_again}
    tables = {key for key in second.fixed & (once.keys() - set_again) if key[0] in {path for path, _ in numbers}}
    reused = tables | {key for key in numbers if key[0] in {path for path, _ in tables}}
    return {key: max(first.calls[number].exit for number in _innermost(first, key)) for key in sorted(reused, key=str)}


def reason_against_cut(states: Iterable[CarriedState], cut: int) -> str:
    """Return a message if code before the cut and code after the cut use the same state; else an empty text."""
    for state in states:
        if state.first < cut <= state.last:
            remedy = "use it in one block only, which returns what others need"
            return f'forward changes "{state.name}", which both sides of the cut use ({remedy})'
    return ""


def _innermost(recording: Recording, key: AttributeKey) -> list[int]:
    setting = {call.number for call in recording.calls if key in map(attribute_key, call.changes)}
    return [number for number in setting if setting.isdisjoint(recording.calls[number].children)]
