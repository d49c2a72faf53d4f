"""Which layers of a profile share parameters, and how many bytes of them must be one and the same."""

from collections.abc import Sequence

from planner.core.cost.chain_costs import Tie
from planner.core.values.profile import LayerProfile


def ties_of(layers: Sequence[LayerProfile]) -> tuple[Tie, ...]:
    """The pairs of layers that share parameters, with what they share for certain."""
    ties = []
    for second, layer in enumerate(layers):
        if not layer.tied:
            continue
        trained = _trained_surely(layer)
        for first, size, these_alone, earlier in _shared(layers, second):
            shared_bytes = trained * size / layer.tied_bytes
            ties.append(
                Tie(
                    first=first,
                    second=second,
                    parameter_bytes=size,
                    gradient_bytes=shared_bytes,
                    optimizer_bytes=layer.optimizer_bytes * shared_bytes / max(1, layer.trained_bytes),
                    cast_bytes=min(_casts_surely(layers[first], size), _casts_surely(layer, size)),
                    these_alone=these_alone,
                    earlier=earlier,
                )
            )
    return tuple(ties)


def _trained_surely(layer: LayerProfile) -> float:
    """Bytes of gradients that must be of tied parameters, which may be frozen: all others have as many as they are."""
    untied_bytes = layer.parameter_bytes - layer.idle_bytes - layer.tied_bytes
    return max(0.0, layer.trained_bytes - max(0, untied_bytes))


def _casts_surely(layer: LayerProfile, tied_bytes: int) -> float:
    """Bytes of copies that must be of tied parameters: those of all others are half as large as these at most."""
    return max(0.0, layer.cast_bytes - (layer.parameter_bytes - tied_bytes) / 2)


def _shared(layers: Sequence[LayerProfile], second: int) -> list[tuple[int, int, bool, tuple[int, ...]]]:
    """The earlier layers that a stage must hold to have what `second` shares once, each with the rest of a `Tie`."""
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
        return [(owners[-1], tied_bytes, True, tuple(owners[:-1]))]  # all share one and the same: the nearest will do
    if sum(theirs) <= tied_bytes:
        return [(first, size, True, ()) for first, size in zip(owners, theirs, strict=True)]  # each shares another
    return [(owners[0], tied_bytes, False, ())]  # not told apart: only a stage that holds them all is sure
