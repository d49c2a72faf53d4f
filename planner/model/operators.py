"""Watch torch's operators as they run, and find out which tensors they write and whether results depend on values."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.model.nests import tensors_in


class OperatorWatch(TorchDispatchMode):
    """Torch dispatch mode that calls functions before and after every operator.

    Args:
        before: Function of (operator, arguments, keywords). It sees arguments before the operator overwrites them.
        after: Function of (operator, arguments, keywords, result).
    """

    def __init__(
        self,
        *,
        before: Callable[[Any, Any, Any], object] = lambda *_: None,
        after: Callable[[Any, Any, Any, Any], object] = lambda *_: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after
        self._stances = ExitStack()

    def __enter__(self) -> Self:
        """Begin to watch, and disable `torch.compile`, because `fullgraph=True` fails in a dispatch mode."""
        if "torch._dynamo" in sys.modules:
            self._stances.enter_context(torch.compiler.set_stance("force_eager"))
        return cast("Self", super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Stop watching, and enable `torch.compile` again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `before`, run the operator, and call `after`."""
        kwargs = kwargs or {}
        self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        self._after(func, args, kwargs, result)
        return result


def written_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments that the operator overwrites.

    Args:
        func: The operator.
        args: Positional arguments of the operator.
        kwargs: Keyword arguments of the operator.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def depends_on_values(func: Any, arguments: Sequence[Tensor]) -> bool:
    """Return True if the operator's result is a Python value, or has a shape, that depends on tensor values."""
    if func._schema.name == "aten::index" and all(t.dtype is not torch.bool for t in arguments[1:]):
        return False  # of all index tensors, only a mask makes the result's shape depend on values
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
