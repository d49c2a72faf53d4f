"""What of a GPU's memory no tensor can have: the context, loaded kernels, workspaces of the libraries.

None of it is in the allocator's statistics that stages are predicted in, and all of it is there on every device that
trains. So it is measured once, behind the first use of what nearly every model uses: matrix products (cuBLAS) and
convolutions (cuDNN), forward and backward, in single and half precision.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ASSUMED_BYTES", "cuda_reserve_bytes"]

ASSUMED_BYTES: Final = 10**9
"""Of a device that is not here: an allowance, not a measurement; `--reserve` takes what is known better."""

_SIDE = 256
"""Of the matrices and images: large enough for the kernels of real layers."""


def cuda_reserve_bytes(device: torch.device) -> int:
    """Bytes of `device` that are taken and hold no tensor; what other programs have there by now is among them.

    Two parts: what the device has given away beyond the allocator's pool, and what libraries hold in the pool for good
    (cuBLAS has its workspace there). The rest of the pool is free for tensors.
    """
    held = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.float16):
        _use_libraries(device, dtype)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    workspaces = max(0, torch.cuda.memory_allocated(device) - held)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device)) + workspaces


def _use_libraries(device: torch.device, dtype: torch.dtype) -> None:
    def made(*shape: int) -> Tensor:
        return torch.ones(*shape, device=device, dtype=dtype, requires_grad=True)

    product = made(_SIDE, _SIDE) @ made(_SIDE, _SIDE)
    images = functional.conv2d(made(1, 8, _SIDE, _SIDE), made(8, 8, 3, 3), padding=1)
    (product.sum() + images.sum()).backward()
