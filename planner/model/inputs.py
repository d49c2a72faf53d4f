"""Inputs given as text: `3x224x224`, `1024:int64:32000` (shape[:dtype[:upper bound]], without the batch dimension)."""

import torch
from torch import Tensor

from planner.core.errors import UsageError

__all__ = ["input_tensor"]

_EXAMPLE = "for example `--input 3x224x224` or `--input 1024:int64:32000`"


def input_tensor(text: str, batch_size: int) -> Tensor:
    """Random data of shape (batch_size, *shape): normal for floats, uniform below the upper bound for integers.

    Raises:
        UsageError: Not of the form shape[:dtype[:upper bound]].
    """
    shape_text, dtype_text, bound_text = (text.split(":") + ["float32", "2"][text.count(":") :])[:3]
    try:
        shape = [int(size) for size in shape_text.split("x")]
        bound = int(bound_text)
    except ValueError:
        raise UsageError(f"not a shape: `--input {text}`", hint=_EXAMPLE) from None
    dtype = getattr(torch, dtype_text, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"`--input {text}`: torch has no dtype `{dtype_text}`", hint=_EXAMPLE)
    if dtype.is_floating_point:
        return torch.randn(batch_size, *shape, dtype=dtype)
    return torch.randint(bound, (batch_size, *shape), dtype=dtype)
