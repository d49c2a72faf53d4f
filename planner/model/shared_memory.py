"""Check tensors that several layers share: each stage has its own copy, and the copies must train like one tensor."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.chain import Layer, shared_parameters
from planner.model.ghosts import storage_key


class _MemorySpan(NamedTuple):
    """Part of a storage, from byte `begin` to byte `end - 1`, that a layer's tensor covers."""

    layer: int
    name: str
    tensor: Tensor
    begin: int
    end: int

    @property
    def is_trained(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad

    def overlaps(self, other: "_MemorySpan") -> bool:
        return self.begin < other.end and other.begin < self.end


def check_separate_memory(layers: Sequence[Layer]) -> None:
    """Raise a `ModelError` if a trained parameter shares memory with a different tensor of another layer."""
    by_storage: dict[int, list[_MemorySpan]] = {}
    for span in _spans(layers):
        by_storage.setdefault(storage_key(span.tensor), []).append(span)
    for spans in by_storage.values():
        if len({id(span.tensor) for span in spans}) == 1:
            continue
        for one, other in combinations(spans, 2):
            is_other_tensor = one.tensor is not other.tensor and one.layer != other.layer
            if is_other_tensor and (one.is_trained or other.is_trained) and one.overlaps(other):
                trained, sharer = (one, other) if one.is_trained else (other, one)
                raise ModelError(
                    f'the trained parameter "{trained.name}" and "{sharer.name}" are two tensors in the same memory, '
                    f'in the layers "{layers[trained.layer].name}" and "{layers[sharer.layer].name}": on two devices '
                    "an update of one would not reach the other",
                    hint="make them one parameter (`head.weight = embedding.weight`, without `.data`), or let one be "
                    "a copy (`.clone()`)",
                )


def num_hooks(parameter: Tensor) -> int:
    """Return the number of hooks on the parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def check_hooks(hooked: Mapping[str, nn.Parameter], layers: Sequence[Layer]) -> None:
    """Raise a `ModelError` if a trained parameter of several layers has a gradient hook.

    Autograd calls a hook with the sum of the gradients of all uses of the parameter. In a pipeline, each stage would
    call the hook with the gradient of its own layers alone.
    """
    for owners in shared_parameters(layers):
        parameter = next((hooked[name] for _, name in owners if name in hooked), None)
        if parameter is not None and parameter.requires_grad:
            names = ", ".join(dict.fromkeys(f'"{layers[index].name}"' for index, _ in owners))
            raise ModelError(
                f'"{owners[0][1]}", a parameter of the layers {names}, has a hook: the model calls it with the sum of '
                "the gradients of these layers, and a stage with the gradient of its own layers",
                hint="let `step` of the optimizer that `build_optimizer` returns change `parameter.grad` instead, "
                "or give each layer a parameter of its own",
            )


def _spans(layers: Sequence[Layer]) -> Iterator[_MemorySpan]:
    for index, layer in enumerate(layers):
        for name, tensor in (*layer.parameters_by_name().items(), *layer.buffers_by_name().items()):
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            begin = int(tensor.storage_offset()) * tensor.itemsize
            last = sum(
                (int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            yield _MemorySpan(index, name, tensor, begin, begin + (last + 1) * tensor.itemsize)
