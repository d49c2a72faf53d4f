"""How a model's tensors grow with the batch, as two forwards of batches of different size tell.

Every dimension is taken for a straight line through the two sizes that were seen:

    value          2 samples    4 samples    n samples
    embeddings     (2, 7, 16)   (4, 7, 16)   (n, 7, 16)
    windows        (6, 16)      (12, 16)     (3 n, 16)
    padded words   (2, 9)       (4, 7)       none: its shape depends on the data

Nothing can be cut where a tensor of the last kind crosses, nor inside of a call that calls other modules for another
batch: a pipeline takes the same path, and sends the same tensors, for every micro-batch.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import ModelError
from planner.model.attributes import Change
from planner.model.leaves import Constant, Leaf, Value, counted
from planner.model.recording import Call, Join, Recording

SIZES = (2, 4)
"""Samples in the two batches that are run. Not 1, which batch normalization and broadcasting treat in their own way."""

ShapePair = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of one value, in a batch of either size."""

Shapes = dict[int, ShapePair]
"""By value."""


def shape_at(pair: ShapePair, size: int) -> tuple[int, ...]:
    """The shape in a batch of `size` samples."""
    step = SIZES[1] - SIZES[0]
    return tuple(max(0, a + (b - a) * (size - SIZES[0]) // step) for a, b in zip(*pair, strict=True))


def candidates_in_both(recording: Recording, other: Recording) -> dict[Join, ShapePair]:
    """What may be a join for batches of either size, and its shapes; of the joins, those of `recording`."""
    other_shapes = {place: other.values[join.value][1].shape for place, join in _candidates_by_place(other)}
    pairs = {}
    for place, join in _candidates_by_place(recording):
        shape, other_shape = recording.values[join.value][1].shape, other_shapes.get(place, ())
        if len(shape) == len(other_shape) and _grows(shape, other_shape):
            pairs[join] = shape, other_shape
    return pairs


def shapes_in_both(recording: Recording, other: Recording, cuts: Sequence[int]) -> tuple[Shapes, list[Call]]:
    """The shapes of what comes into sight of code that a cut goes through, and the calls that take no fixed path.

    Also settles, in the calls of `recording`, which whole numbers among the leaves count samples.

    Raises:
        ModelError: The model's inputs have another structure for another batch.
    """
    varying: list[Call] = []
    shapes = _paired("the model's input", recording.inputs, other.inputs)
    # Calls are followed in pairs: their numbers differ behind a call that makes more calls for another batch.
    open_pairs = [(0, 0)]
    while open_pairs:
        first, second = open_pairs.pop()
        call, other_call = recording.calls[first], other.calls[second]
        if [recording.calls[c].path for c in call.children] != [other.calls[c].path for c in other_call.children]:
            varying.append(call)
            continue
        for number, other_number in zip(call.children, other_call.children, strict=True):
            # A value that several calls return is the same tensor: the first one says what it is.
            shapes = _shapes_of_call(recording.calls[number], other.calls[other_number]) | shapes
            if any(recording.calls[number].enter < cut <= recording.calls[number].exit for cut in cuts):
                open_pairs.append((number, other_number))
    if recording.unread:
        with contextlib.suppress(ModelError):  # it may return what it likes, but then nothing stands in for that
            shapes = _paired("the model", recording.calls[0].leaves, other.calls[0].leaves) | shapes
    return shapes, varying


def refusals_of_cuts(
    cuts: Iterable[tuple[int, str, Sequence[int]]], shapes: Shapes, varying: Sequence[Call]
) -> dict[int, ModelError]:
    """The cuts that go through a call without a fixed path, or that something crosses which depends on the data.

    Args:
        cuts: Every cut, the name of the layer in front of it, and the values that cross it.
        shapes: By value, as `shapes_in_both` has them.
        varying: The calls that take no fixed path.
    """
    refusals: dict[int, ModelError] = {}
    for cut, name, values in cuts:
        # The path is looked at first: off it, the values of the two recordings do not belong together.
        through = next((call.path for call in varying if call.enter < cut <= call.exit), None)
        error = _data_dependence(name, values, shapes) if through is None else _no_fixed_path(through)
        if error is not None:
            refusals[cut] = error
    return refusals


def _candidates_by_place(recording: Recording) -> Iterator[tuple[tuple[Any, ...], Join]]:
    """What may be a join, by where it is; numbers of calls are others where a module calls more for another batch."""
    places: list[tuple[int, ...]] = [()] * len(recording.calls)
    # A parent comes before its children, so its place is known by then.
    for call in recording.calls:
        for position, child in enumerate(call.children):
            places[child] = (*places[call.number], position)
    for join in recording.candidates:
        yield (places[join.call], join.gap, join.called), join


def _shapes_of_call(call: Call, other: Call) -> Shapes:
    """The shapes of what one call returned and left behind; its whole numbers that count samples become `Counted`."""
    shapes: Shapes = {}
    # What it returns may be of another structure, as long as none of it crosses a cut: then no shape is known of it.
    with contextlib.suppress(ModelError):
        shapes = _paired(call.path, call.leaves, other.leaves)
        call.leaves = _counted(call.leaves, other.leaves)
    call.changes, left_behind = _changes_in_both(call, other)
    return left_behind | shapes


def _paired(path: str, leaves: Sequence[Leaf], others: Sequence[Leaf]) -> Shapes:
    if len(leaves) != len(others):
        raise _another_structure(path)
    pairs = [(leaf, other) for leaf, other in zip(leaves, others, strict=True) if isinstance(leaf, Value)]
    if any(not isinstance(b, Value) or len(a.meta.shape) != len(b.meta.shape) for a, b in pairs):
        raise _another_structure(path)
    return {a.number: (a.meta.shape, b.meta.shape) for a, b in pairs if isinstance(b, Value)}


def _counted(leaves: Sequence[Leaf], others: Sequence[Leaf]) -> tuple[Leaf, ...]:
    return tuple(counted(leaf, other, SIZES) for leaf, other in zip(leaves, others, strict=True))


def _changes_in_both(call: Call, other: Call) -> tuple[tuple[Change, ...], Shapes]:
    """What a call leaves in attributes for either batch, and the shapes of the tensors among that."""
    other_leaves = {(change.path, change.keys, change.kind, change.nest): change.leaves for change in other.changes}
    kept: list[Change] = []
    shapes: Shapes = {}
    for change in call.changes:
        # Changes are matched by place and structure: one call may leave several behind, in any order.
        others = other_leaves.get((change.path, change.keys, change.kind, change.nest), ())
        leaves = _counted(change.leaves, others) if others else ()
        # A number that depends on the data is for somebody to look at: nothing is known of it behind a cut.
        if not leaves or any(isinstance(a, Constant) and a != b for a, b in zip(leaves, others, strict=True)):
            continue
        with contextlib.suppress(ModelError):
            shapes |= _paired(call.path, leaves, others)
            kept.append(replace(change, leaves=leaves))
    return tuple(kept), shapes


def _grows(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether every sample more adds as much, and no dimension would be negative without samples."""
    if not all(type(length) is int for length in (*shape, *other)):
        return False  # the ragged dimension of a nested tensor
    step = SIZES[1] - SIZES[0]
    growth = [b - a for a, b in zip(shape, other, strict=True)]
    return all(g % step == 0 and 0 <= g // step * SIZES[0] <= a for a, g in zip(shape, growth, strict=True))


def _data_dependence(name: str, values: Sequence[int], shapes: Shapes) -> ModelError | None:
    """Why no boundary can be behind a layer: what crosses it depends on the data."""
    if any(value not in shapes for value in values):
        return ModelError(
            f'what crosses the boundary behind "{name}" is something else for another batch size',
            hint="a pipeline needs the same tensors for every batch",
        )
    for shape, other in (shapes[value] for value in values):
        if not _grows(shape, other):
            return ModelError(
                f'what crosses the boundary behind "{name}" has shape {list(shape)} for {SIZES[0]} samples and '
                f"{list(other)} for {SIZES[1]}: it depends on the data",
                hint="let shapes follow from the batch size alone: pad to a fixed length, in place of "
                "`pack_padded_sequence`, a choice by mask or routing between modules",
            )
    return None


def _no_fixed_path(path: str) -> ModelError:
    return ModelError(
        f'"{path or "the model"}" calls other modules for another batch size: it takes no fixed path',
        hint="a pipeline needs the same layers for every batch",
    )


def _another_structure(path: str) -> ModelError:
    return ModelError(
        f'"{path}" returns something of another structure for another batch size',
        hint="a pipeline needs the same tensors for every batch",
    )
