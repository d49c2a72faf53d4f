"""How much of its own state a layer's forward writes: what a micro-batch keeps as it was if it is to be recomputed."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.model.ghosts import storage_of
from planner.model.operators import written_tensors
from planner.model.state import Place, state_owners
from planner.model.statistics import collecting_layers
from planner.profile.units import Unit, UnitInput

__all__ = ["rewritten_bytes"]


def rewritten_bytes(unit: Unit, received: UnitInput) -> int:
    """Bytes of buffers, frozen parameters and the like that a forward of the unit writes, or puts others in place of.

    The unit has run before: what is made once, such as a table, is there. Running statistics of batch normalisations
    are not written by the forward of a stage (`planner.model.statistics`).

    Args:
        unit: The layer.
        received: Its input, of any micro-batch size.
    """
    deferred = set(collecting_layers(unit.module))
    owners = [owner for owner in state_owners([(unit.name, unit.module)]) if owner.module not in deferred]
    before = [(place, place.value, _storage(place.value)) for owner in owners for place in owner.places()]
    watch = _Writes()
    # A layer must not meet a leaf, which it could not write into.
    values = [value.clone() if isinstance(value, Tensor) else value for value in received.fresh()]
    with torch.no_grad(), watch:
        unit.run(values, received)
    # By storage, so that what has several names counts once.
    written = {
        storage._cdata: value.nbytes
        for place, value, storage in before
        if storage is not None and _is_rewritten(place, value, storage, watch.storages)
    }
    return sum(written.values())


class _Writes(TorchDispatchMode):
    """Notes the storages that operators write into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, Tensor] = {}
        """With a tensor in each, so that no other takes its address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in written_tensors(func, args, kwargs or {}):
            self.storages[storage_of(tensor)._cdata] = tensor
        return result


def _storage(value: Any) -> torch.UntypedStorage | None:
    return storage_of(value) if isinstance(value, Tensor) and value.layout == torch.strided else None


def _is_rewritten(place: Place, value: Tensor, storage: torch.UntypedStorage, written: dict[int, Tensor]) -> bool:
    return place.value is not value or storage_of(value)._cdata != storage._cdata or storage._cdata in written
