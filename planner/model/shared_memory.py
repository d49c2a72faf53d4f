"""Checks of tensors that several layers hold: stages hold copies of them, which must train like the one tensor."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.chain import Layer
from planner.model.ghosts import storage_key


class _Span(NamedTuple):
    """Part of a storage that a tensor of a layer covers, from byte `begin` to before byte `end`."""

    layer: int
    name: str
    tensor: Tensor
    begin: int
    end: int

    @property
    def is_trained(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad

    def overlaps(self, other: "_Span") -> bool:
        return self.begin < other.end and other.begin < self.end


def check_separate_memory(layers: Sequence[Layer]) -> None:
    """Check that no trained parameter overlaps another tensor of another layer in memory.

    In one process an update of one changes the other, and an optimizer steps two trained parameters one after the
    other. Stages on several devices have the same parameter, but not the same memory.

    Raises:
        ModelError: Naming both.
    """
    by_storage: dict[int, list[_Span]] = {}
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


def _spans(layers: Sequence[Layer]) -> Iterator[_Span]:
    for index, layer in enumerate(layers):
        for name, tensor in (*layer.parameter_names().items(), *layer.buffer_names().items()):
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            begin = int(tensor.storage_offset()) * tensor.itemsize
            last = sum(
                (int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            yield _Span(index, name, tensor, begin, begin + (last + 1) * tensor.itemsize)
