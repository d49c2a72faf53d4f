"""Keep the gradients of a large model in files, so that a backward takes the memory of one gradient, not of all.

Code can use these gradients like any other. The memory of a gradient is mapped to a file: the system reads its pages
when they are used, and copies the pages that a later addition changes.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor, nn

from planner.device.machine import release_file_pages

_LEAST_BYTES = 2**22
"""Size in bytes from which gradients are moved to files."""


def keep_gradients_in_files(parameters: Iterable[nn.Parameter], folder: Path) -> None:
    """Move each large gradient to a file after every backward that adds to it.

    If the parameter's memory is mapped to a file, its pages are released too, because backward no longer needs them.
    All other hooks on the parameters must be registered before this call. No file stays in `folder`: each is removed as
    soon as it is mapped, and its space is freed with the gradient.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.nbytes >= _LEAST_BYTES:
            parameter.register_post_accumulate_grad_hook(partial(_move, folder=folder))


def _move(parameter: Tensor, *, folder: Path) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.layout is torch.strided and gradient.is_contiguous():
        parameter.grad = _in_file(gradient, folder)
    release_file_pages(parameter.data_ptr(), parameter.nbytes)


def _in_file(tensor: Tensor, folder: Path) -> Tensor:
    with NamedTemporaryFile(dir=folder) as file:
        tensor.view(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        values = torch.from_file(file.name, shared=False, size=tensor.numel(), dtype=tensor.dtype)
    return values.view(tensor.shape)
