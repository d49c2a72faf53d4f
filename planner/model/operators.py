"""What torch's own description of an operator says of it: where it writes, and whether values decide what it makes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.model.nests import tensors_in

__all__ = ["decides", "written_tensors"]


def written_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments that it writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def decides(func: Any, arguments: Sequence[Tensor]) -> bool:
    """Whether Python, or the shape of the operator's result, depends on the values of its tensors."""
    if func._schema.name == "aten::index" and all(t.dtype is not torch.bool for t in arguments[1:]):
        return False  # only a mask makes the shape depend on values
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
