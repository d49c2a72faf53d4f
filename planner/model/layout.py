"""Keep the memory layout of tensors that cross a stage boundary.

A layer may return a dense tensor whose dimensions have another order in memory than in its shape: an LSTM with the
batch first, a convolution with the channels last. Such a tensor is sent in its memory order. A contiguous copy would
cost memory on the sending stage, and the next layer would get other strides than in the unpartitioned model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def meta_tensor_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a meta tensor with the dtype and memory layout of `tensor`, and with `shape` (default: the tensor's)."""
    return torch.empty_permuted(
        tensor.shape if shape is None else tuple(shape),
        _order(tensor),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=tensor.requires_grad,
    )


def match_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` in the memory layout of `like`, copied only if the layouts differ.

    A conjugation or negation that torch has not yet computed is computed.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() and like.is_contiguous():  # this shortcut serves nearly all calls; permuting takes longer
        return tensor
    order = _order(like)
    if tensor.permute(order).is_contiguous():
        return tensor
    return tensor.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a tensor's memory, for a transfer.

    The dimensions of the view are in memory order. The view may lack an autograd history.
    """
    if tensor.is_contiguous() or (order := _order(tensor)) == tuple(range(tensor.dim())):
        return tensor
    shape, strides = ([sizes[n] for n in order] for sizes in (tensor.shape, tensor.stride()))
    # A view would keep `tensor` itself in memory.
    with torch.no_grad():
        return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)


def _order(tensor: Tensor) -> tuple[int, ...]:
    counted = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return counted
    strides = tensor.stride()
    order = tuple(sorted(counted, key=lambda n: -strides[n]))
    return order if tensor.permute(order).is_contiguous() else counted
