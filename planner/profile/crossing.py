"""What crosses from a layer to the next while both are timed: memory as it is within a stage, and never its numbers.

A layer finds its input where the layer before it has just written its output, in a cache, say, and the gradient of its
output where the layer behind it has. What stands there is written over, with the input that the layer was traced with
and with ones: through many layers of random parameters numbers may become so small that a CPU takes a hundred times as
long for them, or none at all.
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
    """The inputs of a layer for one micro-batch, non-leaves as in a stage."""

    values: list[Any]
    carrying: list[int]
    """Positions of those that carry gradients."""
    gradients: list[Tensor | None]
    """Theirs, once a backward has come to them."""

    def gradient_of(self, position: int) -> Tensor | None:
        """The gradient of the input at that position, if there is one."""
        return dict(zip(self.carrying, self.gradients, strict=False)).get(position)


class Exit:
    """The outputs of a layer for one micro-batch, where its backward starts.

    Attributes:
        end: A scalar whose backward is that of all outputs; None if none of them carries a gradient.
    """

    def __init__(self, outputs: Sequence[Any], own: frozenset[int]) -> None:
        self._own = own
        self._gradients: list[Tensor] = []
        self._shapes = {n: (output.new_empty(0), output.shape) for n, output in enumerate(outputs) if _carries(output)}
        carrying = [outputs[n] for n in self._shapes]
        self.end: Tensor | None = _End.apply(self._gradients, *carrying) if carrying else None  # type: ignore[no-untyped-call]

    def fill(self, behind: Entrance | None) -> None:
        """Makes the gradients of the outputs, where possible where the layer behind has left those of its inputs.

        They are made once: later calls do nothing.
        """
        for n, (like, shape) in self._shapes.items() if not self._gradients else ():
            there = None if behind is None else behind.gradient_of(n)
            if there is not None and _is_like(there, like, shape) and storage_key(there) not in self._own:
                self._gradients.append(there.fill_(1.0))
            else:
                self._gradients.append(like.new_ones(shape))


def own_memory(unit: Unit) -> frozenset[int]:
    """That of its parameters and buffers, which is not to be written over."""
    return frozenset(map(storage_key, (*unit.module.parameters(), *unit.module.buffers())))


def is_small(values: Iterable[Any]) -> bool:
    """Whether it makes more difference what ran before a layer than where its input lies."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) <= _SMALL_BYTES


def entrance_of(received: UnitInput, before: Sequence[Any] = (), own: frozenset[int] = frozenset()) -> Entrance:
    """What a layer gets: its traced input, in the memory of what the layer before it returned where that is alike.

    Args:
        received: The input.
        before: What the layer before it returned.
        own: That layer's own memory.
    """
    outputs = before if len(before) == len(received.values) else [None] * len(received.values)
    values = [_entering(value, output, own) for value, output in zip(received.values, outputs, strict=True)]
    carrying = [n for n, value in enumerate(values) if _carries(value) and _is_plain(value)]
    entrance = Entrance(values, carrying, [])
    if carrying:
        leaves = [values[n] for n in carrying]
        inside = _Entrance.apply(entrance.gradients, *leaves)  # type: ignore[no-untyped-call]
        for n, value in zip(carrying, inside, strict=True):
            values[n] = value
    return entrance


def _entering(value: Any, output: Any, own: frozenset[int]) -> Any:
    """An input as it was traced: a new leaf, or what is no longer one where it is a tensor of another kind."""
    if not isinstance(value, Tensor):
        return value
    # What carries no gradient may be a table that the model keeps.
    takes_over = _carries(value) and _carries(output) and output.stride() == value.stride()
    if takes_over and _is_like(output, value, value.shape) and storage_key(output) not in own:
        return _same_memory(output).copy_(value.detach()).requires_grad_()
    leaf = value.detach().clone().requires_grad_(value.requires_grad)
    return leaf if _is_plain(leaf) else leaf.clone()


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided


def _is_like(tensor: Tensor, like: Tensor, shape: torch.Size) -> bool:
    """Whether its memory can hold such numbers, each in a place of its own."""
    return (
        _is_plain(tensor)
        and (tensor.dtype, tensor.shape, tensor.device) == (like.dtype, shape, like.device)
        and all(stride or size == 1 for size, stride in zip(shape, tensor.stride(), strict=True))
    )


def _same_memory(tensor: Tensor) -> Tensor:
    """No view of it: whoever writes into one does not count as writing into the other."""
    with torch.no_grad():
        return tensor.new_empty(0).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


class _Entrance(torch.autograd.Function):
    """Takes gradients to the inputs of a layer; autograd would add them up in leaves, which copies some of them."""

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
    """Hands on gradients that were there before, and holds them no longer: whoever gets one may keep it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients
