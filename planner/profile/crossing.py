"""Pass tensors between layers that are timed one after another, so that data is in the same caches as within a stage.

In forward, a layer's input has the memory of the previous layer's output. In backward, the gradient of a layer's output
has the memory of the gradient of the next layer's input.

Only the memory is passed, not the values. Before each pass, inputs are set to their traced values, and gradients to
ones. Otherwise, values may become NaN or denormal after many layers with random parameters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.model.ghosts import storage_key
from planner.profile.units import LayerToMeasure, MeasurementInput

_SMALL_BYTES = 2**18


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer for one micro-batch. They are no leaves of the autograd graph."""

    values: list[Any]
    carrying: list[int]
    """Positions of the inputs that require gradients."""
    gradients: list[Tensor | None]
    """Gradients of the inputs that require gradients, in the order of `carrying`; empty before the backward."""


class LayerOutputs:
    """Outputs of a layer for one micro-batch, from which its backward starts."""

    def __init__(self, outputs: Sequence[Any], own_storages: frozenset[int]) -> None:
        self._own_storages = own_storages
        self._gradients: list[Tensor] = []
        self._shapes = {n: (output.new_empty(0), output.shape) for n, output in enumerate(outputs) if _carries(output)}
        carrying = [outputs[n] for n in self._shapes]
        self.end: Tensor | None = _End.apply(self._gradients, *carrying) if carrying else None  # type: ignore[no-untyped-call]
        """Scalar from which `backward` reaches all outputs; None if no output requires a gradient."""

    def create_gradients(self, next_inputs: LayerInputs | None) -> None:
        """Create the gradients of the outputs, filled with ones, unless they exist.

        An output of this layer is the input of the next layer at the same position. If possible, the gradient of the
        output takes over the memory of that input's gradient, whose values are then lost.

        Args:
            next_inputs: Inputs of the next layer; None to allocate new memory for all gradients.
        """
        given = {} if next_inputs is None else dict(zip(next_inputs.carrying, next_inputs.gradients, strict=False))
        for n, (like, shape) in self._shapes.items() if not self._gradients else ():
            there = given.get(n)
            if there is not None and _is_like(there, like, shape) and storage_key(there) not in self._own_storages:
                self._gradients.append(there.fill_(1.0))
            else:
                self._gradients.append(like.new_ones(shape))


def own_storages_of(unit: LayerToMeasure) -> frozenset[int]:
    """Return keys that identify the storages of a layer's parameters and buffers."""
    return frozenset(map(storage_key, (*unit.module.parameters(), *unit.module.buffers())))


def tensors_fit_in_cache(values: Iterable[Any]) -> bool:
    """Return True if the tensors in `values` have at most 256 KiB together. All CPUs and GPUs can cache these."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) <= _SMALL_BYTES


def make_layer_inputs(
    received: MeasurementInput, previous_outputs: Sequence[Any] = (), own_storages: frozenset[int] = frozenset()
) -> LayerInputs:
    """Return copies of a layer's traced inputs, if possible in the memory of the previous layer's outputs.

    Args:
        received: Traced input of the layer.
        previous_outputs: Outputs of the previous layer.
        own_storages: Storages of the previous layer's parameters and buffers, which must not be overwritten.
    """
    count = len(received.values)
    outputs = previous_outputs if len(previous_outputs) == count else [None] * count
    values = [_copy_input(value, output, own_storages) for value, output in zip(received.values, outputs, strict=True)]
    carrying = [n for n, value in enumerate(values) if _carries(value) and _is_plain(value)]
    entrance = LayerInputs(values, carrying, [])
    if carrying:
        leaves = [values[n] for n in carrying]
        inside = _EntranceFunction.apply(entrance.gradients, *leaves)  # type: ignore[no-untyped-call]
        for n, value in zip(carrying, inside, strict=True):
            values[n] = value
    return entrance


def _copy_input(value: Any, output: Any, own_storages: frozenset[int]) -> Any:
    """Return a copy of a traced input, if possible in the memory of `output`, an output of the previous layer."""
    if not isinstance(value, Tensor):
        return value
    # An output without a gradient may be a table that the model keeps, so its memory is not overwritten.
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
    return (
        _is_plain(tensor)
        and (tensor.dtype, tensor.shape, tensor.device) == (like.dtype, shape, like.device)
        and all(stride or size == 1 for size, stride in zip(shape, tensor.stride(), strict=True))
    )


def _same_memory(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory, with a version counter of its own."""
    with torch.no_grad():
        return tensor.new_empty(0).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


class _EntranceFunction(torch.autograd.Function):
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
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients
