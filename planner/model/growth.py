"""Determine how the shapes of a model's tensors grow with the batch size, from forwards of two batches.

Every dimension is assumed to be linear in the number of samples; two recorded batch sizes determine the line:

    value          2 samples    4 samples    n samples
    embeddings     (2, 7, 16)   (4, 7, 16)   (n, 7, 16)
    windows        (6, 16)      (12, 16)     (3 n, 16)
    padded words   (2, 9)       (4, 7)       none: its shape depends on the data

The model is not cut where a tensor with a data-dependent shape, as in the last row, would cross. It is also not cut
inside a module that calls other submodules for another batch size.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import ModelError
from planner.model.attributes import AttributeChange
from planner.model.leaves import ConstantValue, Leaf, TensorLeaf, VaryingResult, as_sample_count
from planner.model.nests import Nest, common_leaf_positions, common_nest, leaf_names
from planner.model.recording import FunctionResult, ModuleCall, Recording

SIZES = (2, 4)
"""Numbers of samples in the two batches. Batch normalization and broadcasting treat a single sample differently."""

ShapePair = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of one tensor in the batches of `SIZES[0]` and `SIZES[1]` samples."""

Shapes = dict[int, ShapePair]
"""Shapes of tensors in the two recorded batches, by index in `Recording.values`."""


def sendable_results(recording: Recording, other: Recording) -> dict[FunctionResult, ShapePair]:
    """Return the function results that may be sent across cuts, each with its shapes in both batches.

    The batches have `SIZES[0]` and `SIZES[1]` samples. A result is left out if it occurs in one recording only, or if
    its shape depends on the data.
    """
    other_shapes = {place: other.values[candidate.value][1].shape for place, candidate in _candidates_by_place(other)}
    pairs = {}
    for place, candidate in _candidates_by_place(recording):
        shape, other_shape = recording.values[candidate.value][1].shape, other_shapes.get(place, ())
        if len(shape) == len(other_shape) and _grows(shape, other_shape):
            pairs[candidate] = shape, other_shape
    return pairs


def shapes_in_both_recordings(
    recording: Recording, other: Recording, cuts: Sequence[int]
) -> tuple[Shapes, list[ModuleCall]]:
    """Return the shapes of tensors that may cross a cut, and the calls whose code depends on the batch size.

    Also replace integers in `recording` that grow with the batch size by `SampleCount` leaves.

    Args:
        recording: Forward of a batch of `SIZES[0]` samples.
        other: Forward of a batch of `SIZES[1]` samples.
        cuts: Positions of the cuts in `recording`.

    Returns:
        Shapes by index of the tensor, and the module calls whose submodule calls depend on the batch size.

    Raises:
        ModelError: The model's inputs have another structure for another batch.
    """
    varying: list[ModuleCall] = []
    shapes = _paired("the model's input", recording.inputs, other.inputs)
    # Calls are followed in pairs: their numbers differ after a call that makes more calls for another batch.
    open_pairs = [(0, 0)]
    while open_pairs:
        first, second = open_pairs.pop()
        call, other_call = recording.calls[first], other.calls[second]
        if [recording.calls[c].path for c in call.children] != [other.calls[c].path for c in other_call.children]:
            varying.append(call)
            continue
        for number, other_number in zip(call.children, other_call.children, strict=True):
            # A value that several calls return is one tensor; the first of these calls defines its shape.
            shapes = _shapes_of_call(recording.calls[number], other.calls[other_number]) | shapes
            if any(recording.calls[number].enter < cut <= recording.calls[number].exit for cut in cuts):
                open_pairs.append((number, other_number))
    model = recording.calls[0]
    if recording.unread:
        if model.nest != other.calls[0].nest and model.nest == recording.output_nest:
            _merge_outputs(recording, other)
        with contextlib.suppress(ModelError):  # an output of varying structure is allowed, but gets no stand-ins
            shapes = _paired("the model", model.leaves, other.calls[0].leaves) | shapes
    return shapes, varying


def cut_errors(
    cuts: Iterable[tuple[int, str, Sequence[int]]], shapes: Shapes, varying: Sequence[ModuleCall]
) -> dict[int, ModelError]:
    """Return an error for each cut where the model depends on the batch size or the data.

    Args:
        cuts: For every cut: its position in the recorded forward, the name of the layer before it, and the indices of
            the tensors that cross it.
        shapes: Shapes by index of the tensor, from `shapes_in_both_recordings`.
        varying: Module calls whose submodule calls depend on the batch size.
    """
    refusals: dict[int, ModelError] = {}
    for cut, name, values in cuts:
        # The path is checked first: if it varies, tensors of the two recordings do not correspond.
        through = next((call.path for call in varying if call.enter < cut <= call.exit), None)
        error: ModelError | None
        if through is None:
            error = _data_dependence(name, values, shapes)
        else:
            error = ModelError(
                f'"{through or "the model"}" calls other modules for another batch size: it takes no fixed path',
                hint="a pipeline needs the same layers for every batch",
            )
        if error is not None:
            refusals[cut] = error
    return refusals


def _candidates_by_place(recording: Recording) -> Iterator[tuple[tuple[Any, ...], FunctionResult]]:
    """Yield pairs: the position of a function result in the model's code, and the result (`Recording.candidates`)."""
    places: list[tuple[int, ...]] = [()] * len(recording.calls)
    # A parent precedes its children in `calls`, so the place of the parent is already known.
    for call in recording.calls:
        for position, child in enumerate(call.children):
            places[child] = (*places[call.number], position)
    for candidate in recording.candidates:
        yield (places[candidate.call], candidate.gap, candidate.called), candidate


def _shapes_of_call(call: ModuleCall, other: ModuleCall) -> Shapes:
    shapes: Shapes = {}
    # A result of varying structure is allowed if no varying part crosses a cut; the shapes of the part are unknown.
    if call.nest != other.nest:
        _merge_structures(call, other)
    with contextlib.suppress(ModelError):
        shapes = _paired(call.path, call.leaves, other.leaves)
        call.leaves = _with_sample_counts(call.leaves, other.leaves)
    call.changes, left_leaves = _changes_in_both(call, other)
    return left_leaves | shapes


def _common_places(call: ModuleCall, other: ModuleCall) -> tuple[Nest, list[int | None], list[int | None]]:
    """Return the common structure of two results, and the positions of its leaves in each result.

    For a part that differs, both lists have None.
    """
    common = common_nest(call.nest, other.nest)
    pairs = zip(common_leaf_positions(call.nest, common), common_leaf_positions(other.nest, common), strict=True)
    places = [(None, None) if None in pair else pair for pair in pairs]
    return common, [first for first, _ in places], [second for _, second in places]


def _merge_structures(call: ModuleCall, other: ModuleCall) -> None:
    """Put `VaryingResult` in place of each part whose structure differs between the results of two calls."""
    common, *places = _common_places(call, other)
    names = leaf_names(common, call.path)
    for each, numbers in zip((call, other), places, strict=True):
        each.leaves = tuple(
            ConstantValue(VaryingResult(name)) if number is None else each.leaves[number]
            for number, name in zip(numbers, names, strict=True)
        )
        each.nest, each.is_varying = common, True


def _merge_outputs(recording: Recording, other: Recording) -> None:
    """Put `VaryingResult` in place of each model output whose structure differs between two recordings.

    Do nothing if the loss reads one of these outputs.
    """
    model, other_model = recording.calls[0], other.calls[0]
    _, places, _ = _common_places(model, other_model)
    outputs = tuple(-1 if place is None else recording.outputs[place] for place in places)
    if recording.unread.issuperset(set(recording.outputs).difference(outputs)):
        _merge_structures(model, other_model)
        recording.outputs, recording.output_nest = outputs, model.nest
        recording.unread &= frozenset(outputs)


def _paired(path: str, leaves: Sequence[Leaf], other_leaves: Sequence[Leaf]) -> Shapes:
    if len(leaves) != len(other_leaves):
        raise _another_structure(path)
    pairs = [(leaf, other) for leaf, other in zip(leaves, other_leaves, strict=True) if isinstance(leaf, TensorLeaf)]
    if any(not isinstance(b, TensorLeaf) or len(a.meta.shape) != len(b.meta.shape) for a, b in pairs):
        raise _another_structure(path)
    return {a.number: (a.meta.shape, b.meta.shape) for a, b in pairs if isinstance(b, TensorLeaf)}


def _with_sample_counts(leaves: Sequence[Leaf], other_leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    return tuple(as_sample_count(leaf, other, SIZES) for leaf, other in zip(leaves, other_leaves, strict=True))


def _changes_in_both(call: ModuleCall, other: ModuleCall) -> tuple[tuple[AttributeChange, ...], Shapes]:
    other_leaves = {(change.path, change.keys, change.kind, change.nest): change.leaves for change in other.changes}
    kept: list[AttributeChange] = []
    shapes: Shapes = {}
    for change in call.changes:
        # Changes are matched by place and structure, because a call may make several changes, in any order.
        others = other_leaves.get((change.path, change.keys, change.kind, change.nest), ())
        leaves = _with_sample_counts(change.leaves, others) if others else ()
        # A number that depends on the data is not restored: its value is unknown after a cut.
        if not leaves or any(isinstance(a, ConstantValue) and a != b for a, b in zip(leaves, others, strict=True)):
            continue
        with contextlib.suppress(ModelError):
            shapes |= _paired(call.path, leaves, others)
            kept.append(replace(change, leaves=leaves))
    return tuple(kept), shapes


def _grows(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    if not all(type(length) is int for length in (*shape, *other)):
        return False  # the ragged dimension of a nested tensor
    step = SIZES[1] - SIZES[0]
    growth = [b - a for a, b in zip(shape, other, strict=True)]
    return all(g % step == 0 and 0 <= g // step * SIZES[0] <= a for a, g in zip(shape, growth, strict=True))


def _data_dependence(name: str, values: Sequence[int], shapes: Shapes) -> ModelError | None:
    if any(value not in shapes for value in values):
        return ModelError(
            f'the tensors sent after "{name}" differ for another batch size',
            hint="a pipeline needs the same tensors for every batch",
        )
    for shape, other in (shapes[value] for value in values):
        if not _grows(shape, other):
            return ModelError(
                f'a tensor sent after "{name}" has shape {list(shape)} for {SIZES[0]} samples and '
                f"{list(other)} for {SIZES[1]}: it depends on the data",
                hint="let shapes depend on the batch size alone: pad to a fixed length instead of using "
                "`pack_padded_sequence`, masks or routing between modules",
            )
    return None


def _another_structure(path: str) -> ModelError:
    return ModelError(
        f'"{path}" returns something of another structure for another batch size',
        hint="a pipeline needs the same tensors for every batch",
    )
