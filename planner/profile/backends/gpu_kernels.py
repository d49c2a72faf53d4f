"""Make layers on ghosts (tensors without values) save for backward what they would save on a GPU.

Otherwise, layers on ghosts save the same tensors as on a CPU. In two cases, a GPU saves less:

- Attention that has dropout, or a mask that requires gradients, or values that differ in width from keys. A CPU saves
the scores in float32. A GPU runs a fused kernel, which saves the caller's mask, but no scores.
- Dropout. Its saved mask has the input's dtype on a CPU, and booleans on a GPU.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Positional arguments of torch's attention."""


class GpuSavedTensorsMode(TorchFunctionMode):
    """Function mode in which attention and dropout save the same tensors as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function; for attention and dropout, run what a GPU would run."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(**dict(zip(_NAMES, args, strict=False)), **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    learned = attn_mask is not None and attn_mask.requires_grad
    on_cpu = not (learned or dropout_p > 0 or query.shape[-1] != value.shape[-1])
    if on_cpu or query.dim() != 4 or query.shape[:2] != key.shape[:2]:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
    query, key, value = (_cast(tensor) for tensor in (query, key, value))
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query).expand(*query.shape[:2], query.shape[2], key.shape[2])
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=options.get("scale")
    )[0]
    return result


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return _cast(mask)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))


def _cast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def _dropout(  # torch's signature
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    if not training or p == 0 or inplace:
        return functional.dropout(input, p, training, inplace)
    dropped: Tensor = torch.native_dropout(input, p, train=True)[0]
    return dropped
