"""Make the copies of a tensor on several ranks equal when a run starts.

Every rank builds its stages from the same seed, so copies are usually equal. Values from an unseeded generator or from
a clock differ, however, and copies that start with different values never become equal.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.run.placement import gather_from_all_ranks


def can_be_equalized(tensor: Tensor) -> bool:
    """Return True if `equalize_copies` can compare the tensor: it is dense, has elements, and is not quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def equalize_copies(tensors: Mapping[str, Tensor]) -> None:
    """Copy each tensor from the first rank that has it to all ranks where its values differ.

    Every rank of the job must call this function, with its parameters and buffers by name. `can_be_equalized` must be
    true for each of them.
    """
    holders = Counter(name for names in gather_from_all_ranks(list(tensors)) for name in names)
    digests = gather_from_all_ranks({n: digest_of_tensor(t) for n, t in tensors.items() if holders[n] > 1})
    rank = dist.get_rank()
    # All ranks process the tensors in the same order, so that no two ranks wait for each other.
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


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a digest of the values of a tensor for which `can_be_equalized` is true."""
    return hashlib.sha256(_bytes_of(tensor).cpu().numpy().data).hexdigest()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
