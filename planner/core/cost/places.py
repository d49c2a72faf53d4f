"""Arrays that differ from stage to stage, in places that every device of one program has (`planner.bridge.packing`).

Arrays of one shape and type take turns in one place, as long as that wastes little; else all of a type lie behind each
other in one vector, without padding.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from planner.core.values.profile import ArrayKind

MOST_ROOM: Final = 1.5
"""What places may take over the largest stage's arrays, padding left out; beyond that there are vectors."""

_Kind = TypeVar("_Kind")


def places_for(stages: Iterable[Mapping[_Kind, int]]) -> Counter[_Kind]:
    """How many places of each kind there are for stages with so many arrays of it: the larger number of each."""
    places: Counter[_Kind] = Counter()
    for stage in stages:
        places |= Counter(stage)
    return places


def are_vectors(places_bytes: float, largest_bytes: float) -> bool:
    """Whether places of so many bytes, the largest stage's arrays taking so many, are given up for vectors."""
    return places_bytes > MOST_ROOM * largest_bytes


def share_of_places(stages: Sequence[Sequence[ArrayKind]]) -> float:
    """What every device has for arrays of all stages, over what the fullest stage's take; 1 where there are none.

    In places an array that is narrow takes half; one stage's vector has the numbers of another's.
    """
    counts = [_counted(stage) for stage in stages]
    fullest = max((_padded_bytes(count) for count in counts), default=0)
    if not fullest:
        return 1.0
    places = places_for(counts)
    if not are_vectors(_plain_bytes(places), max(map(_plain_bytes, counts))):
        return sum(number * _loop_bytes(array) for array, number in places.items()) / fullest
    longest: defaultdict[str, int] = defaultdict(int)
    for count in counts:
        lengths: Counter[str] = Counter()
        for array, number in count.items():
            lengths[array.kind.partition("[")[0]] += number * array.plain_bytes
        for name, length in lengths.items():
            longest[name] = max(longest[name], length)
    return sum(longest.values()) / fullest


_Counted = Counter[ArrayKind]


def _counted(stage: Sequence[ArrayKind]) -> _Counted:
    counted: _Counted = Counter()
    for array in stage:
        counted[replace(array, count=1)] += array.count
    return counted


def _padded_bytes(counted: _Counted) -> int:
    return sum(number * array.bytes for array, number in counted.items())


def _loop_bytes(array: ArrayKind) -> float:
    return array.bytes / 2 if array.narrow else array.bytes


def _plain_bytes(counted: _Counted) -> int:
    return sum(number * array.plain_bytes for array, number in counted.items())
