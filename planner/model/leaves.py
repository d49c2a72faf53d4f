"""Leaves of recorded results and attributes. A tensor is recorded by its shape and dtype, without its values."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from planner.core.errors import ModelError


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides, offset, dtype and gradient flag of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        """Return the record of `tensor`."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, int(tensor.storage_offset()), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Number of bytes that a transfer of the tensor sends; too few for a nested tensor, which is never sent."""
        sizes: tuple[object, ...] = self.shape
        # A ragged dimension of a nested tensor is a symbol, not an integer.
        return math.prod(size for size in sizes if isinstance(size, int)) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorLeaf:
    """Leaf of a recorded result: a tensor, given by its index in `Recording.values`."""

    number: int
    meta: TensorMeta


@dataclass(frozen=True)
class ArgumentLeaf:
    """Leaf of a recorded result that is also an argument of the call: its index among the leaves of the arguments."""

    argument: int


@dataclass(frozen=True)
class NamedLeaf:
    """Parameter or module of the model in the result of a recorded call, given by its name."""

    name: str


@dataclass(frozen=True)
class ConstantValue:
    """Leaf of a recorded result: a value that is no tensor and does not depend on the number of samples."""

    value: Any


@dataclass(frozen=True)
class SampleCount:
    """Leaf of a recorded result: an integer or `torch.Size` that grows linearly with the number of samples."""

    at_zero: tuple[int, ...]
    """Integers for zero samples, extrapolated from the recorded integers."""
    per_sample: tuple[int, ...]
    """Increase per sample of the recorded integer, or of each integer of the recorded `torch.Size`."""
    is_size: bool
    """True if the leaf is a `torch.Size`; False if it is a single integer."""

    def of(self, size: int) -> Any:
        """Return the value of the recorded integer or `torch.Size` in a batch of `size` samples."""
        numbers = (number + size * more for number, more in zip(self.at_zero, self.per_sample, strict=True))
        return torch.Size(numbers) if self.is_size else next(numbers)


class VaryingResult:
    """Placeholder for a part of a result whose structure depends on the batch, such as a list with an item per sample.

    A stage gets it instead of the part that an earlier stage computed. Any use raises an error.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Raise an error: the placeholder has no attributes."""
        if name.startswith("__"):  # `copy` and `pickle` ask for methods that an object may lack
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise ModelError(
            f'"{self._name}" has another structure for another batch size, and a later stage reads it',
            hint="return a tensor whose first dimension counts the samples, instead of a list with an item per sample",
        )

    __len__ = __getitem__ = __iter__ = _refuse


Leaf = TensorLeaf | ArgumentLeaf | NamedLeaf | ConstantValue | SampleCount


def as_sample_count(leaf: Leaf, other: Leaf, sizes: tuple[int, int]) -> Leaf:
    """Return `leaf` as a `SampleCount` if its integers grow linearly with the number of samples; else `leaf` itself.

    Args:
        leaf: Leaf recorded with a batch of `sizes[0]` samples.
        other: The same leaf recorded with a batch of `sizes[1]` samples.
        sizes: Numbers of samples in the two batches.
    """
    if not (isinstance(leaf, ConstantValue) and isinstance(other, ConstantValue)):
        return leaf
    if is_same_constant(leaf.value, other.value):
        return leaf
    is_size = isinstance(leaf.value, torch.Size)
    values = (leaf.value, other.value)
    numbers, more = (tuple(value) if isinstance(value, torch.Size) else (value,) for value in values)
    is_alike = type(leaf.value) is type(other.value) and len(numbers) == len(more)
    if not is_alike or any(type(n) is not int for n in numbers):
        return leaf
    step = sizes[1] - sizes[0]
    if any((b - a) % step for a, b in zip(numbers, more, strict=True)):
        return leaf
    each = tuple((b - a) // step for a, b in zip(numbers, more, strict=True))
    return SampleCount(tuple(a - sizes[0] * slope for a, slope in zip(numbers, each, strict=True)), each, is_size)


def is_plain(value: Any) -> bool:
    """Return True if the value is None, a number, a text, a `torch.Size`, a dtype or a device."""
    plain = bool | int | float | str | torch.Size | torch.dtype | torch.device
    return value is None or isinstance(value, plain)


def is_same_constant(one: Any, other: Any) -> bool:
    """Return True if two values that are no tensors have the same type and are equal."""
    try:
        return type(one) is type(other) and bool(one == other)
    except ValueError:  # of arrays of NumPy, which are equal element by element
        return bool(np.array_equal(one, other))


def describe_constant(value: Any) -> str:
    """Return the text of a value that is no tensor, in one line."""
    return " ".join(repr(value).split())
