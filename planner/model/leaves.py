"""Leaves of what a call returned or left in attributes, as they are recorded: none of them holds a tensor."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Meta:
    """Properties of a tensor without its values: shape, strides and offset in its storage, dtype, and gradient flag."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        """Return the properties of `tensor`."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
        )

    @property
    def nbytes(self) -> int:
        """Bytes to send it."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class Value:
    """Leaf that is a tensor, given by its number in `Recording.values`."""

    number: int
    meta: Meta


@dataclass(frozen=True)
class Passed:
    """Leaf that is the same object as the argument at this position."""

    argument: int


@dataclass(frozen=True)
class HeldTensor:
    """Leaf that is this parameter or buffer itself."""

    name: str


@dataclass(frozen=True)
class Constant:
    """Leaf that is not a tensor."""

    value: Any


@dataclass(frozen=True)
class SampleCount:
    """Leaf that is one or several integers that grow linearly with the number of samples."""

    at_zero: tuple[int, ...]
    """Values for zero samples."""
    per_sample: tuple[int, ...]
    """Increase per sample."""
    is_size: bool
    """True if they form a `torch.Size`."""

    def of(self, size: int) -> Any:
        """Return the value for `size` samples."""
        numbers = (number + size * more for number, more in zip(self.at_zero, self.per_sample, strict=True))
        return torch.Size(numbers) if self.is_size else next(numbers)


Leaf = Value | Passed | HeldTensor | Constant | SampleCount


def as_sample_count(leaf: Leaf, other: Leaf, sizes: tuple[int, int]) -> Leaf:
    """Return `leaf` as a function of the number of samples, if the two recordings show that it is one.

    Args:
        leaf: Leaf recorded with a batch of `sizes[0]` samples.
        other: The same leaf recorded with `sizes[1]` samples.
        sizes: Both numbers of samples.

    Returns:
        A `SampleCount`, or `leaf` itself if it does not grow linearly with the batch.
    """
    if not (isinstance(leaf, Constant) and isinstance(other, Constant)) or leaf == other:
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
    """Return True if the value is immutable, so that an equal one can replace it."""
    plain = bool | int | float | str | torch.Size | torch.dtype | torch.device
    return value is None or isinstance(value, plain)
