"""Costs of a profile at one of its micro-batch sizes, as arrays over the layers.

How memory is computed depends on what the profile has for each layer:

    `MemoryDetail`           exact: from all tensors that layers save or pass to later layers
    required fields only     upper bound: the sum of all bytes that may be stored, plus temporary memory
    `ProgramMemory` (TPU)    the memory model of the package for TPUs (`planner.core.extensions`)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray
from planner.core.cost.chain_costs import (
    BoundaryBytes,
    LayerMemory,
    LayerMemoryModel,
    SplitBackwardCosts,
    prefix_sums,
    suffix_sums,
)
from planner.core.cost.storages import (
    CrossingBytes,
    CrossingStorages,
    PassedTensor,
    crossing_storages_without_details,
    writes_received,
)
from planner.core.values.profile import LayerProfile, MemoryDetail, SplitMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledLayerCosts:
    """Memory of a chain's layers, and times of split backwards, at one of the profile's micro-batch sizes."""

    gradients: FloatArray
    boundaries: BoundaryBytes
    memory: LayerMemory
    split_backward: Callable[[], SplitBackwardCosts]
    """Function that computes the costs of split backwards on first use, because few schedules split backwards."""
    memory_model: LayerMemoryModel | None = None
    target: float = 0.0
    crossing: dict[tuple[int, int], CrossingBytes]
    relays: dict[PassedTensor, int]
    """Bytes of the gradient of each tensor that layers pass on unchanged."""


def cost_bounds_without_details(layers: Sequence[LayerProfile], n: int) -> ProfiledLayerCosts:
    """Return upper bounds of the costs at the micro-batch size with index `n`, for layers without `MemoryDetail`."""
    output = _per_layer(layers, lambda layer: layer.output_bytes[n])
    saved = _per_layer(layers, lambda layer: layer.saved_bytes[n])
    forward = _per_layer(layers, lambda layer: layer.forward_peak_bytes[n] if layer.forward_peak_bytes else 0)
    backward = _per_layer(layers, lambda layer: layer.backward_peak_bytes[n] if layer.backward_peak_bytes else 0)
    nothing = np.zeros(len(layers))
    gradients = _per_layer(layers, lambda layer: layer.created_gradient_bytes)
    return ProfiledLayerCosts(
        gradients=gradients,
        boundaries=BoundaryBytes(
            input=np.append(0.0, output[:-1]),
            output=output,
            input_gradient=np.append(0.0, output[:-1]),
            output_gradient=output,
            # It is unknown whether `saved` includes the output. Assume that it includes as much as possible.
            unsaved_output=np.maximum(output - saved, 0.0),
            unsaved_input=nothing,
            input_alive=nothing,
            copied_input=nothing,
        ),
        memory=LayerMemory(
            saved=saved,
            # Again, assume that `saved` includes as much of the output as possible.
            internal=np.maximum(saved - output, 0.0),
            forward=forward,
            no_grad=saved + forward,
            first_backward=backward,
            backward=backward,
            output_in_first_backward=nothing,
            output_in_backward=nothing,
            attributes=nothing,
            renewed=nothing,
        ),
        split_backward=cache(
            partial(_additive_split_backward, layers, n, saved=saved, transient=backward, gradients=gradients)
        ),
        crossing=crossing_storages_without_details(layers, n),
        relays={},
    )


def costs_from_details(layers: Sequence[LayerProfile], n: int) -> ProfiledLayerCosts:
    """Return the costs at the micro-batch size with index `n`, for layers that all have `MemoryDetail`."""
    details = [layer.detail[n] for layer in layers]
    storages = CrossingStorages(details)
    crossing, relays, writes = storages.crossing_bytes(), storages.relays(), np.array(writes_received(details))
    saved, crossing_bytes, unkept, passing = (
        np.array(sizes, dtype=float)
        for sizes in (storages.saved(), storages.bytes_after(), storages.unsaved_bytes_after(), storages.passing())
    )
    boundaries = _boundaries(details, crossing_bytes, unkept, writes)
    gradients = _per_layer(layers, lambda layer: layer.created_gradient_bytes)
    at_end = _stored_at_stage_end(boundaries, passing)
    return ProfiledLayerCosts(
        gradients=gradients,
        boundaries=boundaries,
        memory=_exact_levels(layers, details, boundaries, saved=saved, gradients=gradients, at_end=at_end),
        split_backward=cache(
            partial(_exact_split_backward, layers, n, saved=saved, gradients=gradients, at_end=at_end)
        ),
        target=float(details[-1].target_bytes),
        crossing=crossing,
        relays=relays,
    )


def _boundaries(
    details: Sequence[MemoryDetail], crossing_bytes: FloatArray, unkept: FloatArray, writes: BoolArray
) -> BoundaryBytes:
    # Tensors are sent one by one, even if they share a storage. A stage stores whole storages.
    received = np.array([sum(tensor.bytes for tensor in detail.inputs) for detail in details], float)
    gradients = np.array([sum(each.bytes for each in detail.inputs if each.carries) for detail in details], float)
    output = np.append(np.maximum(crossing_bytes[:-1], received[1:]), crossing_bytes[-1])
    return BoundaryBytes(
        input=received,
        output=output,
        input_gradient=gradients,
        output_gradient=np.append(gradients[1:], crossing_bytes[-1]),
        unsaved_output=unkept,
        # Input that no layer keeps still exists while its layer runs. The model's own input is counted elsewhere.
        unsaved_input=np.append(0.0, unkept[:-1]),
        input_alive=np.append(0.0, output[:-1]),
        copied_input=received * writes,
    )


def _exact_levels(
    layers: Sequence[LayerProfile],
    details: Sequence[MemoryDetail],
    boundaries: BoundaryBytes,
    *,
    saved: FloatArray,
    gradients: FloatArray,
    at_end: FloatArray,
) -> LayerMemory:
    held = prefix_sums(saved)[:-1]
    gradients_through = np.cumsum(gradients)
    casts_through = np.cumsum(_per_layer(layers, lambda layer: layer.cast_bytes))

    def peaks(peak: Callable[[MemoryDetail], int]) -> FloatArray:
        return np.array([peak(detail) for detail in details], dtype=float)

    def twice(peak: FloatArray, at_stage_end: Callable[[MemoryDetail], int | None]) -> FloatArray:
        ends = [at_stage_end(detail) for detail in details]
        more = [0.0 if end is None else peak[n] + at_end[n] - end for n, end in enumerate(ends)]
        counted: FloatArray = np.maximum(np.array(more), 0.0)
        return counted

    first_backward = peaks(lambda detail: detail.first_backward_peak_bytes)
    backward = peaks(lambda detail: detail.backward_peak_bytes)
    return LayerMemory(
        saved=saved,
        internal=peaks(lambda detail: detail.internal_bytes),
        forward=held + boundaries.unsaved_input + peaks(lambda detail: detail.forward_peak_bytes),
        no_grad=peaks(lambda detail: detail.no_grad_peak_bytes) + boundaries.input_alive,
        # Gradients of later layers exist already. Their sum is added at the stage's end, so those of this layer and of
        # earlier layers are subtracted here.
        first_backward=held + first_backward - gradients_through + gradients_through[-1],
        # Gradients of autocast copies are counted in the same way, because they wait for the end of the backward.
        backward=held + backward - casts_through + casts_through[-1],
        output_in_first_backward=twice(first_backward, lambda detail: detail.end_first_backward_peak_bytes),
        output_in_backward=twice(backward, lambda detail: detail.end_backward_peak_bytes),
        attributes=peaks(lambda detail: detail.attribute_bytes),
        renewed=peaks(lambda detail: detail.renewed_bytes),
    )


def _stored_at_stage_end(boundaries: BoundaryBytes, passing: FloatArray) -> FloatArray:
    # The engine stores the outputs that a stage creates and the gradients that it receives for its outputs.
    # Outputs of earlier layers are not in the layer's own peak. The last layer receives no gradient.
    held: FloatArray = boundaries.output + boundaries.output_gradient - passing
    held[-1] -= boundaries.output_gradient[-1]
    return held


def _split_backward_us(layers: Sequence[LayerProfile], n: int, gradients: FloatArray) -> tuple[FloatArray, FloatArray]:
    # Times that were not measured are assumed to be half of the backward. A layer without gradients has no W.
    whole_us = _per_layer(layers, lambda layer: layer.backward_us[n])
    weight_us = np.where(gradients > 0, whole_us / 2, 0.0)
    for place, layer in enumerate(layers):
        if layer.backward_weight_us:
            weight_us[place] = layer.backward_weight_us[n]
            whole_us[place] = layer.backward_input_us[n] + layer.backward_weight_us[n]
    return whole_us - weight_us, weight_us


def _additive_split_backward(
    layers: Sequence[LayerProfile], n: int, *, saved: FloatArray, transient: FloatArray, gradients: FloatArray
) -> SplitBackwardCosts:
    input_us, weight_us = _split_backward_us(layers, n, gradients)
    held = [layer.weight_held_bytes[n] if layer.weight_held_bytes else saved[i] for i, layer in enumerate(layers)]
    return SplitBackwardCosts(
        input_us=input_us,
        weight_us=weight_us,
        held=np.array(held, float),
        weight_gradients=gradients,
        first_input=transient,
        input=transient,
        end_first_input=transient,
        end_input=transient,
        first_weight=transient,
        weight=transient,
    )


def _exact_split_backward(
    layers: Sequence[LayerProfile], n: int, *, saved: FloatArray, gradients: FloatArray, at_end: FloatArray
) -> SplitBackwardCosts:
    input_us, weight_us = _split_backward_us(layers, n, gradients)
    records = [
        layer.split[n] if layer.split else _assumed_split_memory(layer, n, held_bytes=float(saved[i]))
        for i, layer in enumerate(layers)
    ]

    def of(get: Callable[[SplitMemory], int | None], otherwise: FloatArray | float = 0.0) -> FloatArray:
        sizes = [get(record) for record in records]
        return np.where([size is None for size in sizes], otherwise, np.array([size or 0 for size in sizes], float))

    held_input, weight_gradients = of(lambda record: record.held_input_bytes), of(lambda r: r.weight_gradient_bytes)
    # The model's input is part of the mini-batch, which exists during the whole step.
    batch = np.where(np.arange(len(layers)) == 0, held_input, 0.0)
    held = of(lambda record: record.held_bytes) - batch
    # If the next layer keeps its input, which is this layer's output, it counts in the next layer.
    held_output = np.append(held_input[1:], 0.0)
    held_before = prefix_sums(held)[:-1]
    made_by_input = np.maximum(gradients - weight_gradients, 0.0)
    casts = _per_layer(layers, lambda layer: layer.cast_bytes)

    # `stages.py` subtracts the layers after a stage's end from the sums over all later layers of the chain.
    base = prefix_sums(saved)[:-1] + suffix_sums(held)
    first, later = of(lambda r: r.first_input_peak_bytes), of(lambda r: r.input_peak_bytes)
    first_with_output = of(lambda r: r.output_first_input_peak_bytes, first + held_output)
    with_output = of(lambda r: r.output_input_peak_bytes, later + held_output)
    return SplitBackwardCosts(
        input_us=input_us,
        weight_us=weight_us,
        held=held,
        weight_gradients=weight_gradients,
        first_input=base
        + np.minimum(first + held_output, first_with_output)
        - held_output
        + suffix_sums(made_by_input),
        input=base + np.minimum(later + held_output, with_output) - held_output,
        end_first_input=base
        + np.minimum(of(lambda r: r.end_first_input_peak_bytes, inf) - at_end, first)
        + suffix_sums(made_by_input),
        end_input=base + np.minimum(of(lambda r: r.end_input_peak_bytes, inf) - at_end, later),
        first_weight=held_before + of(lambda r: r.first_weight_peak_bytes) - batch + suffix_sums(weight_gradients),
        # Gradients of autocast copies wait for the end of the backward.
        weight=held_before + of(lambda r: r.weight_peak_bytes) - batch + suffix_sums(casts),
    )


def _assumed_split_memory(layer: LayerProfile, n: int, *, held_bytes: float) -> SplitMemory:
    # W is assumed to need all saved tensors and to create all gradients.
    detail, gradients = layer.detail[n], layer.created_gradient_bytes
    return SplitMemory(
        held_bytes=round(held_bytes),
        weight_gradient_bytes=gradients,
        first_input_peak_bytes=detail.backward_peak_bytes,
        input_peak_bytes=detail.backward_peak_bytes,
        first_weight_peak_bytes=round(held_bytes) + gradients,
        weight_peak_bytes=round(held_bytes) + gradients,
    )


def _per_layer(layers: Sequence[LayerProfile], get: Callable[[LayerProfile], float]) -> FloatArray:
    return np.array([get(layer) for layer in layers], dtype=float)
