"""Conversion of tensors to bytes, and names of their dtypes in the safetensors format."""

import json
from functools import cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn


def is_storable(value: Any) -> bool:
    """Return True if `value` is a dense tensor of a type that the safetensors format supports."""
    is_dense = (type(value) is Tensor or isinstance(value, nn.Parameter)) and value.layout is torch.strided
    return is_dense and safetensors_type_name(value.dtype) != ""


@cache
def safetensors_type_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the safetensors format; empty if the format lacks the dtype."""
    try:
        return str(json.loads(save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"])
    except (KeyError, RuntimeError, SafetensorError):
        return ""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes, without a copy if they are contiguous in host memory."""
    values: memoryview = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return values
