"""What a loss reads of a model's output: nothing else of it has to come out of the last stage."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.core.errors import PlannerError
from planner.model.ghosts import SHAPE_ONLY, storage_of
from planner.model.nests import tensors_in
from planner.model.operators import decides

__all__ = ["addresses_read"]


def addresses_read(loss_of: Callable[[Any], object], output: Any) -> set[int] | None:
    """Addresses of the storages that the loss reads; None if it may read others for other values, or fails here."""
    reader = _Reader()
    try:
        with reader:
            loss = loss_of(output)
    except PlannerError:
        raise
    except Exception:  # it is reported where the loss is needed
        return None
    reader.read(tensors_in(loss))  # the output's own loss, say, of which nothing is computed
    return None if reader.decides else reader.addresses


class _Reader(TorchDispatchMode):
    """Notes the addresses of all storages that are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()
        self.decides = False

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Notes these tensors as read."""
        self.addresses.update(storage_of(tensor)._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = tensors_in((args, kwargs or {}))
        if func._schema.name not in SHAPE_ONLY:
            self.read(arguments)
        self.decides = self.decides or decides(func, arguments)
        return func(*args, **(kwargs or {}))
