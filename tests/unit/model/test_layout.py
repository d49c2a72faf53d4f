"""How tensors lie that cross a boundary: as their layer made them, and in an order that both sides agree on."""

import pytest
import torch
from torch import Tensor

from planner.model.layout import in_memory_order, match_layout, meta_tensor_like

VALUE = torch.arange(24.0).reshape(2, 3, 4)
DENSE = [
    VALUE,
    VALUE.transpose(0, 1),
    VALUE.permute(2, 0, 1),
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    VALUE[:1].transpose(0, 2),
    torch.zeros(0, 3).t(),
    torch.tensor(1.0),
]
GAPPED = [VALUE[:, :2], VALUE[:, :1].expand(2, 3, 4), VALUE[..., ::2]]


@pytest.mark.parametrize("value", DENSE)
def test_what_is_dense_crosses_as_it_lies(value: Tensor) -> None:
    """Neither copied nor laid out anew; what is sent is the same memory, in order."""
    shape = meta_tensor_like(value)
    assert (shape.shape, shape.is_meta) == (value.shape, True)
    assert match_layout(value, shape) is value
    sent = in_memory_order(value)
    assert sent.is_contiguous()
    assert sent.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    received = torch.empty_strided(shape.shape, shape.stride())
    in_memory_order(received).copy_(sent)
    assert torch.equal(received, value)


@pytest.mark.parametrize("value", GAPPED)
def test_what_has_gaps_is_copied(value: Tensor) -> None:
    """Into the order in which its dimensions are counted."""
    shape = meta_tensor_like(value)
    assert shape.is_contiguous()
    made = match_layout(value, shape)
    assert made.is_contiguous()
    assert torch.equal(made, value)


def test_what_lies_otherwise_than_agreed_is_copied() -> None:
    """Its gradient comes back."""
    value = VALUE.clone().requires_grad_()
    made = match_layout(value, VALUE.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert made.stride() == (3, 1, 6)
    assert torch.equal(made, value)
    made.backward(VALUE)
    assert torch.equal(value.grad, VALUE)  # type: ignore[arg-type]


def test_the_order_goes_for_other_sizes_too() -> None:
    """The batch grows, and its dimension stays where it lies."""
    assert meta_tensor_like(VALUE.transpose(0, 1).contiguous().transpose(0, 1), (5, 3, 4)).stride() == (4, 20, 1)


def test_what_is_sent_holds_no_history() -> None:
    """Nor the tensor that it is the memory of."""
    value = (VALUE.clone().requires_grad_() * 2).transpose(0, 1)
    sent = in_memory_order(value)
    assert not sent.requires_grad
    assert sent._base is None
