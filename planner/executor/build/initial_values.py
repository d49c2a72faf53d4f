"""Make tensors that several ranks hold equal when a run starts.

Every rank builds its stages from the same seed, so copies are equal as a rule. Values from elsewhere (an unseeded
NumPy generator, the time) differ from process to process, and copies that start different never become equal.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_BYTES = 2**24

_Value = TypeVar("_Value")


def is_copied(tensor: Tensor) -> bool:
    """Return True if `equalize_copies` can compare and send the tensor: it has values, and is not sparse."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def equalize_copies(tensors: Mapping[str, Tensor]) -> None:
    """Copy the values of the first rank that holds a tensor to all other ranks whose values differ.

    Every rank of the job must call it.

    Args:
        tensors: This rank's parameters and buffers, by a name that is the same on all ranks; of those that
            `is_copied` is true for.
    """
    holders = Counter(name for names in _gathered(list(tensors)) for name in names)
    digests = _gathered({name: _digest(tensor) for name, tensor in tensors.items() if holders[name] > 1})
    rank = dist.get_rank()
    # All ranks go through the same list in the same order, so that no two wait for each other.
    for name in sorted(name for name, count in holders.items() if count > 1):
        first, *others = (n for n, digest in enumerate(digests) if name in digest)
        different = [n for n in others if digests[n][name] != digests[first][name]]
        if rank == first:
            for other in different:
                dist.send(_bytes_of(tensors[name]), other)
        elif rank in different:
            received = torch.empty_like(_bytes_of(tensors[name]))
            dist.recv(received, first)
            with torch.no_grad():
                tensors[name].copy_(received.view(tensors[name].dtype).view(tensors[name].shape))


def _gathered(value: _Value) -> list[_Value]:
    """Return the values of all ranks."""
    values: list[_Value] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def _digest(tensor: Tensor) -> bytes:
    digest = hashlib.sha256()
    for chunk in _bytes_of(tensor).split(_CHUNK_BYTES):
        digest.update(chunk.cpu().numpy())
    return digest.digest()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of any dtype as bytes; a copy only if they are not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
