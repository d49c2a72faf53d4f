"""Pairs of layers that share parameters, and the bytes that they share.

The bytes of a pair are lower bounds, because a profile does not list single parameters. For example, it does not say
which of the shared parameters are trained.
"""

from collections.abc import Sequence

from planner.core.cost.chain_costs import TiedParameters
from planner.core.values.profile import LayerProfile


def tied_parameters_of(layers: Sequence[LayerProfile]) -> tuple[TiedParameters, ...]:
    """Return the pairs of layers that share parameters, with lower bounds of the bytes that they share."""
    ties = []
    for second, layer in enumerate(layers):
        if not layer.tied:
            continue
        trained, created_bytes = _least_tied_gradient_bytes(layer), max(1, layer.created_gradient_bytes)
        for first, size, is_pair_known, earlier in _sharing_layers(layers, second):
            shared_bytes = trained * size / layer.tied_bytes
            ties.append(
                TiedParameters(
                    first=first,
                    second=second,
                    parameter_bytes=size,
                    gradient_bytes=shared_bytes,
                    optimizer_bytes=layer.optimizer_bytes * shared_bytes / created_bytes,
                    optimizer_us=layer.optimizer_us * shared_bytes / created_bytes,
                    sum_bytes=min(float(layer.tied_view_bytes), shared_bytes),
                    converted_bytes=min(2 * _least_tied_cast_bytes(layer, size), shared_bytes),
                    cast_bytes=min(_least_tied_cast_bytes(layers[first], size), _least_tied_cast_bytes(layer, size)),
                    is_pair_known=is_pair_known,
                    earlier=earlier,
                )
            )
    return tuple(ties)


def _least_tied_gradient_bytes(layer: LayerProfile) -> float:
    # Some parameters may be frozen.
    untied_bytes = layer.parameter_bytes - layer.idle_bytes - layer.tied_bytes
    return max(0.0, layer.created_gradient_bytes - max(0, untied_bytes))


def _least_tied_cast_bytes(layer: LayerProfile, tied_bytes: int) -> float:
    # A low-precision copy has at most half of its parameter's bytes.
    return max(0.0, layer.cast_bytes - (layer.parameter_bytes - tied_bytes) / 2)


def _sharing_layers(layers: Sequence[LayerProfile], second: int) -> list[tuple[int, int, bool, tuple[int, ...]]]:
    """Return four fields of each `TiedParameters` whose later layer is `second`.

    The fields are `first`, `parameter_bytes`, `is_pair_known` and `earlier`.
    """
    layer, tied_bytes = layers[second], layers[second].tied_bytes
    if layer.tied_groups:
        places = {other.name: place for place, other in enumerate(layers)}
        groups = [([places[name] for name in group.layers], group.bytes) for group in layer.tied_groups]
        return [(owners[-1], size, True, tuple(owners[:-1])) for owners, size in groups]
    owners = [
        first
        for first, other in enumerate(layers[:second])
        if any(name == other.name or name.startswith(other.name + ".") for name in layer.tied)
    ]
    if not owners or not tied_bytes:
        return []
    theirs = [layers[first].tied_bytes for first in owners]
    if min(theirs) >= tied_bytes:
        return [(owners[-1], tied_bytes, True, tuple(owners[:-1]))]  # one tensor, which the nearest layer has
    if sum(theirs) <= tied_bytes:
        return [
            (first, size, True, ()) for first, size in zip(owners, theirs, strict=True)
        ]  # one tensor for each layer
    return [(owners[0], tied_bytes, False, ())]  # unknown: a stage needs all of them
