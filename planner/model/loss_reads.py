"""Find out which tensors of a model's output the loss reads."""

from collections.abc import Callable
from typing import Any

from planner.core.errors import PlannerError
from planner.model.differentiation import DifferentiatesError
from planner.model.ghosts import SHAPE_ONLY, storage_key
from planner.model.nests import tensors_in
from planner.model.operators import OperatorWatch, depends_on_values


def addresses_read(loss_of: Callable[[Any], object], output: Any) -> set[int] | None:
    """Run a loss on `output` and return the addresses of the storages that it reads.

    Return None if the loss fails or calls `torch.autograd.grad`, or if tensor values may decide what it reads.
    """
    addresses: set[int] = set()
    has_decided = False

    def note(func: Any, args: Any, kwargs: Any) -> None:
        nonlocal has_decided
        arguments = tensors_in((args, kwargs))
        if func._schema.name not in SHAPE_ONLY:
            addresses.update(map(storage_key, arguments))
        has_decided = has_decided or depends_on_values(func, arguments)

    try:
        with OperatorWatch(before=note):
            loss = loss_of(output)
    except PlannerError:
        raise
    except (DifferentiatesError, Exception):  # the caller that needs the loss reports its error
        return None
    addresses.update(map(storage_key, tensors_in(loss)))  # an output may itself be the loss
    return None if has_decided else addresses
