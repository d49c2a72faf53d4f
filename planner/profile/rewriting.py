"""How much of its own state a layer's forward writes: what a micro-batch keeps as it was if it is to be recomputed."""

from typing import Any

import torch
from torch import Tensor

from planner.model.ghosts import storage_key, storage_of
from planner.model.operators import OperatorWatch, written_tensors
from planner.model.state import Place, collecting_layers, state_owners
from planner.profile.units import Unit, UnitInput


def rewritten_bytes(unit: Unit, received: UnitInput) -> int:
    """Bytes of buffers, frozen parameters and the like that a forward of the unit writes, or puts others in place of.

    The unit has run before: what is made once, such as a table, is there. What one forward writes and the next one does
    not does not count. Running statistics of batch normalisations are not written by the forward of a stage
    (`planner.model.state`). The input may be of any micro-batch size.
    """
    once, again = _written(unit, received), _written(unit, received)
    # By storage, so that what has several names counts once.
    return sum(dict(again[place] for place in once.keys() & again.keys()).values())


def _written(unit: Unit, received: UnitInput) -> dict[int, tuple[int, int]]:
    """By place of the unit's state that a forward writes: its storage, and the bytes of the value."""
    deferred = set(collecting_layers(unit.module))
    owners = [owner for owner in state_owners([(unit.name, unit.module)]) if owner.module not in deferred]
    before = [(place, place.value, _storage(place.value)) for owner in owners for place in owner.places()]
    written_into: dict[int, Tensor] = {}  # by storage, with a tensor in each, so that no other takes its address

    def note(func: Any, args: Any, kwargs: Any, _result: Any) -> None:
        written_into.update((storage_key(tensor), tensor) for tensor in written_tensors(func, args, kwargs))

    values = received.non_leaves()
    with torch.no_grad(), OperatorWatch(after=note):
        unit.run(values, received)
    return {
        n: (storage._cdata, value.nbytes)
        for n, (place, value, storage) in enumerate(before)
        if storage is not None and _is_rewritten(place, value, storage, written_into)
    }


def _storage(value: Any) -> torch.UntypedStorage | None:
    return storage_of(value) if isinstance(value, Tensor) and value.layout == torch.strided else None


def _is_rewritten(place: Place, value: Tensor, storage: torch.UntypedStorage, written: dict[int, Tensor]) -> bool:
    return place.value is not value or storage_key(value) != storage._cdata or storage._cdata in written
