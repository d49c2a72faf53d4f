"""Check that all ranks draw the same mini-batches.

The first stage reads the inputs and the last stage the targets, which must belong to the same samples.
"""

import zlib
from typing import Any, NamedTuple

import torch

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
        """Return checksums of all elements if `reads_all`, else of some elements of each tensor in host memory."""
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
"""Number of elements of each tensor's first sample, and of its last sample, that are read after the first step."""


def _checksum_of(value: Any, *, reads_all: bool) -> int:
    checksum = 0
    for whole in tensors_in_value(value):
        # Scripts pass meta tensors, or tensors of equal elements, as placeholders for values that a rank does not use.
        if whole.is_meta or whole.layout != torch.strided or not whole.numel() or not whole.ndim:
            continue
        if whole.device.type != "cpu" and not reads_all:
            continue  # reading values of a GPU would wait for it
        ends = (sample.reshape(-1)[:_NUM_ELEMENTS] for sample in (whole[0], whole[-1]))
        values = (whole if reads_all else torch.cat([*ends])).detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        if (values != values[0]).any():
            checksum = zlib.crc32(values.view(torch.uint8).numpy().data, checksum)
    return checksum
