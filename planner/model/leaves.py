"""Leaves of what a call returned or left behind, as they are written down: none of them holds a tensor."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Meta:
    """A tensor without values: shape, strides and offset in its storage, dtype, whether it carries a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        """What is kept of `tensor`."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to send it."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class Value:
    """A leaf of what a call returned: a tensor, by its number in `Recording.values`."""

    number: int
    meta: Meta


@dataclass(frozen=True)
class Passed:
    """A leaf of what a call returned: the very object that was among its arguments, at this place."""

    argument: int


@dataclass(frozen=True)
class Held:
    """A leaf of what a call returned: this parameter or buffer itself."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A leaf of what a call returned: no tensor."""

    value: Any


@dataclass(frozen=True)
class Counted:
    """A leaf: a whole number, or several, that grow with the batch."""

    without: tuple[int, ...]
    """With no sample at all."""
    each: tuple[int, ...]
    """What every sample adds."""
    is_size: bool
    """Whether they are a `torch.Size`."""

    def of(self, size: int) -> Any:
        """What it is for so many samples."""
        numbers = (number + size * more for number, more in zip(self.without, self.each, strict=True))
        return torch.Size(numbers) if self.is_size else next(numbers)


Leaf = Value | Passed | Held | Constant | Counted


def counted(leaf: Leaf, other: Leaf, sizes: tuple[int, int]) -> Leaf:
    """`leaf`, from a batch of one size, in the light of the `other` size: a number of samples is one of any batch."""
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
    return Counted(tuple(a - sizes[0] * slope for a, slope in zip(numbers, each, strict=True)), each, is_size)


def is_plain(value: Any) -> bool:
    """Whether it is a value that nobody changes: another one that is equal does as well."""
    plain = bool | int | float | str | torch.Size | torch.dtype | torch.device
    return value is None or isinstance(value, plain)
