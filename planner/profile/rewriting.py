"""How much of its own state a layer's forward writes: what a micro-batch keeps as it was if it is to be recomputed."""

from typing import Any

import torch
from torch import Tensor

from planner.model.ghosts import storage_key
from planner.model.nests import tensors_in
from planner.model.operators import OperatorWatch, written_tensors
from planner.model.state import Place, StateOwner, collecting_layers, state_owners
from planner.profile.units import Unit, UnitInput


def rewritten_bytes(unit: Unit, received: UnitInput) -> int:
    """Bytes of buffers, frozen parameters and the like that a forward of the unit writes, or puts others in place of.

    The unit has run before: what is made once, such as a table, is there. What one forward writes and the next one does
    not does not count. Running statistics of batch normalisations are not written by the forward of a stage
    (`planner.model.state`). The input may be of any micro-batch size.
    """
    once, again = _written(unit, received), _written(unit, received)
    # By storage, so that what has several names counts once.
    sizes = {storage: size for place in once.keys() & again.keys() for storage, size in again[place].items()}
    return sum(sizes.values())


def _written(unit: Unit, received: UnitInput) -> dict[int, dict[int, int]]:
    """By place of the unit's state that a forward writes: the storages of the value, and the bytes of each."""
    deferred = set(collecting_layers(unit.module))
    owners = [owner for owner in state_owners([(unit.name, unit.module)]) if owner.module not in deferred]
    places = [place for owner in owners for place in (*owner.places(), *_nests(owner))]
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


def _nests(owner: StateOwner) -> list[Place]:
    """Return the attributes that hold several tensors; what was None before the first forward is state as well."""
    held = vars(owner.module)
    return [Place(owner.path, held, name) for name, value in held.items() if isinstance(value, tuple | list)]


def _storages(value: Any) -> dict[int, Tensor]:
    """Return the tensors in a value, which is one or a nest of some, by their storages."""
    return {storage_key(tensor): tensor for tensor in tensors_in(value) if tensor.layout == torch.strided}
