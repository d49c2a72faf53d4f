"""Memory layout of tensors that cross a boundary."""

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
def test_dense_tensors_are_sent_without_a_copy(value: Tensor) -> None:
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
def test_tensors_with_gaps_are_copied_to_contiguous_memory(value: Tensor) -> None:
    shape = meta_tensor_like(value)
    assert shape.is_contiguous()
    made = match_layout(value, shape)
    assert made.is_contiguous()
    assert torch.equal(made, value)


def test_tensors_of_another_layout_are_copied_with_their_gradient() -> None:
    value = VALUE.clone().requires_grad_()
    made = match_layout(value, VALUE.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert made.stride() == (3, 1, 6)
    assert torch.equal(made, value)
    made.backward(VALUE)
    assert torch.equal(value.grad, VALUE)


def test_layout_is_kept_for_other_batch_sizes() -> None:
    assert meta_tensor_like(VALUE.transpose(0, 1).contiguous().transpose(0, 1), (5, 3, 4)).stride() == (4, 20, 1)


def test_sent_tensors_hold_no_graph_and_no_base() -> None:
    value = (VALUE.clone().requires_grad_() * 2).transpose(0, 1)
    sent = in_memory_order(value)
    assert not sent.requires_grad
    assert sent._base is None


def test_lazily_conjugated_tensors_are_sent_with_their_values() -> None:
    value = torch.view_as_complex(torch.randn(2, 3, 2)).conj()
    for sent in (value, value.imag):
        made = in_memory_order(match_layout(sent, meta_tensor_like(sent)))
        assert not made.is_conj()
        assert not made.is_neg()
        assert torch.equal(made, sent)
