"""Measure how many bytes of a layer's state each forward writes.

State is buffers, frozen parameters and tensors in attributes. With recomputation, each micro-batch stores a copy of the
written state.
"""

from typing import Any

import torch
from torch import Tensor

from planner.model.ghosts import storage_key
from planner.model.nests import tensors_in
from planner.model.operators import OperatorWatch, written_tensors
from planner.model.state import StatefulModule, StateLocation, stateful_modules, trained_batch_norms
from planner.profile.units import LayerToMeasure, MeasurementInput


def rewritten_bytes(unit: LayerToMeasure, received: MeasurementInput) -> int:
    """Return the bytes of a layer's state that every forward writes or replaces.

    The layer must have run before. Running statistics of batch normalization do not count.
    """
    # State that only one of two forwards writes does not count, nor do tables that only the first forward computes.
    once, again = _written(unit, received), _written(unit, received)
    # A tensor with several names counts once, by its storage.
    sizes = {storage: size for place in once.keys() & again.keys() for storage, size in again[place].items()}
    return sum(sizes.values())


def _written(unit: LayerToMeasure, received: MeasurementInput) -> dict[int, dict[int, int]]:
    deferred = set(trained_batch_norms(unit.module))
    owners = [owner for owner in stateful_modules([(unit.name, unit.module)]) if owner.module not in deferred]
    places = [place for owner in owners for place in (*owner.locations(), *_nests(owner))]
    before = [(place, place.value, _storages(place.value)) for place in places]
    written_into: dict[int, Tensor] = {}  # by storage; keeping the tensors prevents that addresses are reused

    def note(func: Any, args: Any, kwargs: Any, _result: Any) -> None:
        written_into.update((storage_key(tensor), tensor) for tensor in written_tensors(func, args, kwargs))

    values = received.non_leaf_copies()
    with torch.no_grad(), OperatorWatch(after=note):
        unit.run(values, received)
    return {
        n: {key: tensor.nbytes for key, tensor in storages.items()}
        for n, (place, value, storages) in enumerate(before)
        if place.value is not value
        or _storages(place.value).keys() != storages.keys()
        or not written_into.keys().isdisjoint(storages)
    }


def _nests(owner: StatefulModule) -> list[StateLocation]:
    held = vars(owner.module)
    return [StateLocation(owner.path, held, name) for name, value in held.items() if isinstance(value, tuple | list)]


def _storages(value: Any) -> dict[int, Tensor]:
    return {storage_key(tensor): tensor for tensor in tensors_in(value) if tensor.layout == torch.strided}
