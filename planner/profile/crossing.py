"""Pass tensors between layers that are timed in a row, so that they are in the same memory as within a stage.

A layer finds its input where the previous layer has just written its output, for example in a cache. It finds the
gradient of its output where the next layer has written it. Only the values are replaced: by the layer's traced input,
and by ones. After many layers with random parameters, values may become NaN, or so small that a CPU takes a hundred
times as long for them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.model.ghosts import storage_key
from planner.profile.units import Unit, UnitInput

_SMALL_BYTES = 2**18


@dataclass(frozen=True)
class Entrance:
    """Inputs of a layer for one micro-batch, non-leaves as in a stage."""

    values: list[Any]
    carrying: list[int]
    """Positions of the values that carry gradients."""
    gradients: list[Tensor | None]
    """Gradients of these values, once a backward has reached them."""

    def gradient_of(self, position: int) -> Tensor | None:
        """Return the gradient of the input at a position, if there is one."""
        return dict(zip(self.carrying, self.gradients, strict=False)).get(position)


class Exit:
    """Outputs of a layer for one micro-batch, where its backward starts.

    Attributes:
        end: A scalar whose backward is that of all outputs; None if none of them carries a gradient.
    """

    def __init__(self, outputs: Sequence[Any], own_storages: frozenset[int]) -> None:
        self._own_storages = own_storages
        self._gradients: list[Tensor] = []
        self._shapes = {n: (output.new_empty(0), output.shape) for n, output in enumerate(outputs) if _carries(output)}
        carrying = [outputs[n] for n in self._shapes]
        self.end: Tensor | None = _End.apply(self._gradients, *carrying) if carrying else None  # type: ignore[no-untyped-call]

    def fill(self, behind: Entrance | None) -> None:
        """Make the gradients of the outputs, if possible in the memory of the next layer's input gradients.

        They are made once: later calls do nothing.
        """
        for n, (like, shape) in self._shapes.items() if not self._gradients else ():
            there = None if behind is None else behind.gradient_of(n)
            if there is not None and _is_like(there, like, shape) and storage_key(there) not in self._own_storages:
                self._gradients.append(there.fill_(1.0))
            else:
                self._gradients.append(like.new_ones(shape))


def own_storages_of(unit: Unit) -> frozenset[int]:
    """Return the storages of a unit's parameters and buffers, which must not be overwritten."""
    return frozenset(map(storage_key, (*unit.module.parameters(), *unit.module.buffers())))


def is_small(values: Iterable[Any]) -> bool:
    """Return True if the values fit in a cache, so that earlier layers matter more than the location of its input."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) <= _SMALL_BYTES


def entrance_of(
    received: UnitInput, before: Sequence[Any] = (), own_storages: frozenset[int] = frozenset()
) -> Entrance:
    """Return a layer's traced input, in the memory of the previous layer's outputs if both are alike.

    Args:
        received: The traced input.
        before: Outputs of the previous layer.
        own_storages: Storages of that layer's parameters and buffers.

    Returns:
        The inputs.
    """
    outputs = before if len(before) == len(received.values) else [None] * len(received.values)
    values = [_entering(value, output, own_storages) for value, output in zip(received.values, outputs, strict=True)]
    carrying = [n for n, value in enumerate(values) if _carries(value) and _is_plain(value)]
    entrance = Entrance(values, carrying, [])
    if carrying:
        leaves = [values[n] for n in carrying]
        inside = _EntranceFunction.apply(entrance.gradients, *leaves)  # type: ignore[no-untyped-call]
        for n, value in zip(carrying, inside, strict=True):
            values[n] = value
    return entrance


def _entering(value: Any, output: Any, own_storages: frozenset[int]) -> Any:
    """Return a traced input as a new leaf, or as a non-leaf if it is a tensor of another class."""
    if not isinstance(value, Tensor):
        return value
    # A value without a gradient may be a table that the model keeps.
    takes_over = _carries(value) and _carries(output) and output.stride() == value.stride()
    if takes_over and _is_like(output, value, value.shape) and storage_key(output) not in own_storages:
        return _same_memory(output).copy_(value.detach()).requires_grad_()
    leaf = value.detach().clone().requires_grad_(value.requires_grad)
    return leaf if _is_plain(leaf) else leaf.clone()


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided


def _is_like(tensor: Tensor, like: Tensor, shape: torch.Size) -> bool:
    """Return True if its memory can hold such values, each at a separate address."""
    return (
        _is_plain(tensor)
        and (tensor.dtype, tensor.shape, tensor.device) == (like.dtype, shape, like.device)
        and all(stride or size == 1 for size, stride in zip(shape, tensor.stride(), strict=True))
    )


def _same_memory(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory that is not a view: writes into one are not counted in the other."""
    with torch.no_grad():
        return tensor.new_empty(0).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


class _EntranceFunction(torch.autograd.Function):
    """Autograd function that passes gradients to a layer's inputs; leaves would accumulate them, which copies some."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(map(_same_memory, leaves))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.gradients.extend(gradients)
        return (None,) * (1 + len(gradients))


class _End(torch.autograd.Function):
    """Function that returns existing gradients and releases them, so that autograd may keep or reuse them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients
