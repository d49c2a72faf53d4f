"""Watch torch's operators as they run, and read from their schemas what they write and what depends on values."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.model.nests import tensors_in


class OperatorWatch(TorchDispatchMode):
    """Mode that reports every operator that runs while it is open.

    Args:
        before: Called with operator, arguments and keywords before each operator; it sees the old arguments.
        after: Called with these and the result after each operator; by then it is known which storages are new.
    """

    def __init__(
        self,
        *,
        before: Callable[[Any, Any, Any], object] = lambda *_: None,
        after: Callable[[Any, Any, Any, Any], object] = lambda *_: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        self._after(func, args, kwargs, result)
        return result


def written_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments that it writes into.

    Args:
        func: Operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def decides(func: Any, arguments: Sequence[Tensor]) -> bool:
    """Return True if control flow, or the shape of the operator's result, depends on the values of its tensors."""
    if func._schema.name == "aten::index" and all(t.dtype is not torch.bool for t in arguments[1:]):
        return False  # only a mask makes the shape depend on values
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
