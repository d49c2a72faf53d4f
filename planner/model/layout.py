"""How a tensor that crosses a boundary lies in memory.

A layer may return a dense tensor whose dimensions lie in another order than they are counted in: an LSTM with the batch
first, a convolution with the channels last. It crosses as it lies. A copy of it would cost memory in front of the
boundary, and behind it the next layer would get something else than in the model in one piece.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def shape_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A dense tensor on the meta device that lies as `tensor`, or one like it of another shape, crosses a boundary."""
    return torch.empty_permuted(
        tensor.shape if shape is None else tuple(shape),
        _order(tensor),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=tensor.requires_grad,
    )


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, or a copy of it where it does not lie as `like` does, dimension by dimension."""
    order = _order(like)
    if tensor.permute(order).is_contiguous():
        return tensor
    return tensor.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))


def in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same memory, for a transfer; without history, where it is another tensor."""
    order = _order(tensor)
    if order == tuple(range(tensor.dim())):
        return tensor
    shape, strides = ([sizes[n] for n in order] for sizes in (tensor.shape, tensor.stride()))
    # No view, which would hold on to the tensor that it is of.
    with torch.no_grad():
        return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions as they lie in memory; of a tensor that has gaps or shares places, as they are counted."""
    counted = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return counted
    strides = tensor.stride()
    order = tuple(sorted(counted, key=lambda n: -strides[n]))
    return order if tensor.permute(order).is_contiguous() else counted
