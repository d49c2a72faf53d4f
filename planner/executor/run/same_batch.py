"""Check that all ranks draw the same mini-batches.

The first stage reads the inputs and the last stage the targets, which must belong to the same samples.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.executor.run.parts import tensors_in_value
from planner.model.load import Batch


class BatchChecksums(NamedTuple):
    """Checksums of a mini-batch, or of one replica's part; 0 for inputs or targets that the rank does not have."""

    inputs: int
    targets: int
    is_whole: bool = False
    """True if the mini-batch has the samples of all replicas."""

    @classmethod
    def of(cls, batch: Batch, *, is_whole: bool, reads_all: bool) -> "BatchChecksums":
        """Return checksums of a mini-batch.

        With `reads_all`, they include all elements of all tensors; without it, some elements of each tensor in host
        memory, and nothing of other tensors.
        """
        inputs, targets = (_checksum_of(value, reads_all=reads_all) for value in batch)
        return cls(inputs, targets, is_whole)

    def differ_from(self, other: "BatchChecksums") -> bool:
        """Return True if the checksums of inputs or targets differ. A missing checksum (0) equals any other."""
        return any(own and theirs and own != theirs for own, theirs in zip(self[:2], other[:2], strict=True))

    def completed_by(self, other: "BatchChecksums") -> "BatchChecksums":
        """Return these checksums, with those of `other` in place of missing ones."""
        return self._replace(inputs=self.inputs or other.inputs, targets=self.targets or other.targets)


NO_CHECKSUMS = BatchChecksums(0, 0)
_NUM_ELEMENTS = 16
"""Number of elements that are read from a tensor's first sample, and also from its last sample.

The first step, and the first step after a resume, read all elements.
"""


def _checksum_of(value: Any, *, reads_all: bool) -> int:
    tensors = [tensor.detach() for tensor in tensors_in_value(value)]
    checksum = 0
    for tensor in _dense_values(tensors) if reads_all else _some_elements(tensors):
        dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        checksum = zlib.crc32(f"{tuple(dense.shape)} {dense.dtype}".encode(), checksum)
        checksum = zlib.crc32(dense.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _dense_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Scripts pass meta tensors, or tensors of equal elements, as placeholders if a rank does not use the values.
    dense = [tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in tensors]
    return [] if any(tensor.is_meta for tensor in dense) or all(map(_is_constant, dense)) else dense


def _some_elements(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Tensors on a GPU are left out, because reading their values would wait for it.
    able = [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided and t.numel() and t.ndim]
    ends = [torch.cat([sample.reshape(-1)[:_NUM_ELEMENTS] for sample in (t[0], t[-1])]) for t in able]
    return [tensor for tensor in ends if not _is_constant(tensor)]


def _is_constant(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool((tensor == tensor.reshape(-1)[0]).all())
