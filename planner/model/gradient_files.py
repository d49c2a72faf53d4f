"""Gradients of a large model in files, so that a backward takes the memory of one parameter rather than of all.

The values of a gradient, and all that code can do with it, stay as they are. Its memory is that of a file: the system
reads its pages when they are used, and copies those that a later addition changes.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor, nn

from planner.device.machine import release_file_pages

_LEAST_BYTES = 2**22
"""Size of the smallest gradients that move to files."""


def keep_gradients_in_files(parameters: Iterable[nn.Parameter], folder: Path) -> None:
    """Move each large gradient to a file whenever a backward has added to it.

    Pages of the parameter are released as well if its memory is a file: they were needed last in this backward.

    Args:
        parameters: The parameters; other hooks of theirs must be registered before.
        folder: Folder of the files, which have no names after they are made.
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
