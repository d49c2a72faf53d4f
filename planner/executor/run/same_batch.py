"""Check that all ranks draw the same mini-batches.

The first stage reads the inputs and the last stage the targets, which must belong to the same samples.
"""

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.core.errors import UsageError
from planner.executor.run.parts import tensors_in_value
from planner.executor.run.placement import ProcessPlace, gather_from_all_ranks
from planner.model.load import Batch


class BatchDigest(NamedTuple):
    """Digests of a mini-batch on one rank; None for values that the rank does not have."""

    replica: int | None
    """Replica whose part of a mini-batch was digested; None for a whole mini-batch."""
    inputs: str | None
    targets: str | None


class BatchChecksums(NamedTuple):
    """Checksums of some elements of a mini-batch; 0 for inputs or targets that the rank does not have."""

    inputs: int
    targets: int

    @classmethod
    def of(cls, batch: Batch) -> "BatchChecksums":
        """Return the checksums of a mini-batch."""
        return cls(_checksum_of(batch.inputs), _checksum_of(batch.targets))

    def differ_from(self, other: "BatchChecksums") -> bool:
        """Return True if the checksums of inputs or targets differ. A missing checksum (0) equals any other."""
        return any(own and theirs and own != theirs for own, theirs in zip(self, other, strict=True))

    def completed_by(self, other: "BatchChecksums") -> "BatchChecksums":
        """Return these checksums, with those of `other` in place of missing ones."""
        return BatchChecksums(self.inputs or other.inputs, self.targets or other.targets)


NO_CHECKSUMS = BatchChecksums(0, 0)
_NUM_ELEMENTS = 16
"""Number of elements of each tensor's first sample, and of its last sample, that a checksum includes."""


def digest_of_batch(batch: Batch, place: ProcessPlace, *, is_whole: bool) -> BatchDigest:
    """Return the digests of a mini-batch, or of one replica's part.

    Ranks between the first and the last stage use neither inputs nor targets, and have no digests.

    Args:
        batch: Mini-batch, or the replica's part.
        place: Place of this process in the job.
        is_whole: True if `batch` is the whole mini-batch.
    """
    replica = None if is_whole else place.replica
    if not (place.is_first or place.is_last):
        return BatchDigest(replica, None, None)
    return BatchDigest(replica, _digest_of(batch.inputs), _digest_of(batch.targets))


def check_same_batch(own_digest: BatchDigest) -> None:
    """Compare the digests of all ranks. Every rank must call this function.

    Raises:
        UsageError: A rank has other inputs or targets than another rank of its pipeline.
    """
    seen: dict[tuple[str, int | None], tuple[int, str]] = {}
    for rank, digest in enumerate(gather_from_all_ranks(own_digest)):
        for what, value in (("inputs", digest.inputs), ("targets", digest.targets)):
            if value is None:
                continue
            first, expected = seen.setdefault((what, digest.replica), (rank, value))
            if value != expected:
                raise UsageError(
                    f"rank {rank} has other {what} in its first mini-batch than rank {first}: inputs and targets would "
                    "belong to different samples",
                    hint="give every rank the same mini-batches: from the same files, in the same order, without a "
                    "sampler that splits them over ranks",
                )


def _digest_of(value: Any) -> str | None:
    # Scripts pass meta tensors, or tensors of equal elements, as placeholders if a rank does not use the values.
    tensors = tensors_in_value(value)
    if any(tensor.is_meta for tensor in tensors) or all(map(_is_constant, tensors)):
        return None
    return digest_of_tensors(tensors)


def _checksum_of(value: Any) -> int:
    """Return a checksum of the first elements of the first and last samples; 0 if no tensor has values."""
    checksum = 0
    for tensor in tensors_in_value(value):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel() or not tensor.ndim:
            continue  # reading values of a GPU would wait for it
        ends = torch.cat([sample.detach().reshape(-1)[:_NUM_ELEMENTS] for sample in (tensor[0], tensor[-1])])
        if not _is_constant(ends):
            checksum = zlib.crc32(_bytes_of(ends), checksum)
    return checksum


def digest_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the shapes, dtypes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        digest.update(_bytes_of(dense))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    values = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data


def _is_constant(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool((tensor == tensor.reshape(-1)[0]).all())
