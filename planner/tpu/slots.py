"""Memory for the arrays of different stages, in one program that runs on all devices (`mesh_program`).

Every device has the same slots. A slot stores one array of a given shape and dtype, whatever the stage. If slots would
waste much memory, all arrays of a dtype are concatenated to one vector instead, without padding.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Final, NamedTuple, TypeVar

from planner.core.values.profile import ArrayKind

MOST_ROOM: Final = 1.5
"""Largest accepted ratio: bytes of all slots of a device, divided by bytes of the largest stage's arrays."""

_Kind = TypeVar("_Kind")


def count_slots(stages: Iterable[Mapping[_Kind, int]]) -> Counter[_Kind]:
    """Return the number of slots for each kind of array: the largest number of such arrays in any stage."""
    places: Counter[_Kind] = Counter()
    for stage in stages:
        places |= Counter(stage)
    return places


def slots_waste_memory(slots_bytes: float, largest_bytes: float) -> bool:
    """Return True if `slots_bytes` are more than 1.5 times the bytes of the largest stage's arrays."""
    return slots_bytes > MOST_ROOM * largest_bytes


class SharedSlots(NamedTuple):
    """Memory in which a device can store the arrays of any stage."""

    ratio: float
    """Bytes of the slots or vectors, divided by the bytes of the largest stage's arrays; 1 if there are no arrays."""
    are_vectors: bool
    """True if arrays are concatenated to vectors."""


def shared_slots(stages: Sequence[Sequence[ArrayKind]]) -> SharedSlots:
    """Return the memory in which a device can store the arrays of any of these stages."""
    counts = [Counter(array.kind for array in stage for _ in range(array.count)) for stage in stages]
    fullest = max((sum(array.count * array.bytes for array in stage) for stage in stages), default=0)
    if not fullest:
        return SharedSlots(1.0, are_vectors=False)
    arrays = list(chain.from_iterable(stages))
    plain_bytes = {array.kind: array.plain_bytes for array in arrays}
    places = count_slots(counts)
    if not slots_waste_memory(_sum(places, plain_bytes), max(_sum(count, plain_bytes) for count in counts)):
        return SharedSlots(sum(_loop_bytes(stages, kind) for kind in places) / fullest, are_vectors=False)
    longest: dict[str, int] = {}
    for count in counts:
        for dtype in {_dtype(kind) for kind in count}:
            length = _sum({kind: n for kind, n in count.items() if _dtype(kind) == dtype}, plain_bytes)
            longest[dtype] = max(longest.get(dtype, 0), length)
    return SharedSlots(sum(longest.values()) / fullest, are_vectors=True)


def _loop_bytes(stages: Sequence[Sequence[ArrayKind]], kind: str) -> int:
    # Sizes of one kind can differ, because loops store some arrays with 16 bits per number. Slot n stores the n-th
    # largest array of each stage.
    widths = (
        sorted((a.loop_bytes for a in stage if a.kind == kind for _ in range(a.count)), reverse=True)
        for stage in stages
    )
    return sum(map(max, zip_longest(*widths, fillvalue=0)))


def _sum(counts: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return sum(number * sizes[kind] for kind, number in counts.items())


def _dtype(kind: str) -> str:
    return kind.partition("[")[0]
