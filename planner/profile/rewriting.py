"""Measure how much of its own state a layer's forward writes: recomputation stores these bytes for each micro-batch."""

from typing import Any

import torch
from torch import Tensor

from planner.model.ghosts import storage_key
from planner.model.nests import tensors_in
from planner.model.operators import OperatorWatch, written_tensors
from planner.model.state import StateLocation, StateOwner, collecting_layers, state_owners
from planner.profile.units import Unit, UnitInput


def rewritten_bytes(unit: Unit, received: UnitInput) -> int:
    """Return the bytes of buffers, frozen parameters and similar state that a forward of the unit writes or replaces.

    The unit has run before, so that values that are made once, such as tables, exist. Only state that two forwards in a
    row write is counted. The forward of a stage does not write running statistics of batch normalization
    (`planner.model.state`). The input may have any micro-batch size.
    """
    once, again = _written(unit, received), _written(unit, received)
    # By storage, so that a tensor with several names counts once.
    sizes = {storage: size for place in once.keys() & again.keys() for storage, size in again[place].items()}
    return sum(sizes.values())


def _written(unit: Unit, received: UnitInput) -> dict[int, dict[int, int]]:
    """Return the storages that a forward writes, with their bytes, by location in the unit's state."""
    deferred = set(collecting_layers(unit.module))
    owners = [owner for owner in state_owners([(unit.name, unit.module)]) if owner.module not in deferred]
    places = [place for owner in owners for place in (*owner.locations(), *_nests(owner))]
    before = [(place, place.value, _storages(place.value)) for place in places]
    written_into: dict[int, Tensor] = {}  # by storage, with a tensor in each, so that no other takes its address

    def note(func: Any, args: Any, kwargs: Any, _result: Any) -> None:
        written_into.update((storage_key(tensor), tensor) for tensor in written_tensors(func, args, kwargs))

    values = received.non_leaves()
    with torch.no_grad(), OperatorWatch(after=note):
        unit.run(values, received)
    return {
        n: {key: tensor.nbytes for key, tensor in storages.items()}
        for n, (place, value, storages) in enumerate(before)
        if place.value is not value
        or _storages(place.value).keys() != storages.keys()
        or not written_into.keys().isdisjoint(storages)
    }


def _nests(owner: StateOwner) -> list[StateLocation]:
    """Return the attributes that hold several tensors; those that are None before the first forward are state, too."""
    held = vars(owner.module)
    return [StateLocation(owner.path, held, name) for name, value in held.items() if isinstance(value, tuple | list)]


def _storages(value: Any) -> dict[int, Tensor]:
    """Return the tensors in a value, a tensor or a nest of tensors, by their storages."""
    return {storage_key(tensor): tensor for tensor in tensors_in(value) if tensor.layout == torch.strided}
