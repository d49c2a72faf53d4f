"""Keep the gradients of a large model in files, so that a backward takes the memory of one gradient, not of all.

Code can use these gradients like any other. The memory of a gradient is mapped to a file: the system reads its pages
when they are used, and copies the pages that code changes.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor, nn

from planner.device.machine import release_file_pages

_LEAST_BYTES = 2**22
"""Size in bytes from which gradients are moved to files."""

_PIECE = 2**20
"""Number of elements that are added at a time when a gradient in a file is added to a new gradient."""


def keep_gradients_in_files(parameters: Iterable[nn.Parameter], folder: Path) -> None:
    """Move each large gradient to a file in `folder` after every backward that adds to the gradient.

    All other hooks on the parameters must be registered before this call. No file has to be removed: the space of a
    file is freed with the gradient.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.nbytes >= _LEAST_BYTES:
            kept = _GradientInFile(parameter, folder)
            if not getattr(parameter, "_post_accumulate_grad_hooks", None):  # such a hook must get the sum
                parameter.register_hook(kept.set_earlier_aside)
            parameter.register_post_accumulate_grad_hook(kept.add_earlier_and_move)


class _GradientInFile:
    def __init__(self, parameter: nn.Parameter, folder: Path) -> None:
        self._parameter, self._folder = parameter, folder
        self._earlier: Tensor | None = None
        """Sum of the gradients of earlier backwards, while another backward runs."""

    def set_earlier_aside(self, gradient: Tensor) -> None:
        # With a graph of the backward, the sum must be part of the graph.
        if _is_contiguous(gradient) and _is_contiguous(self._parameter.grad) and not torch.is_grad_enabled():
            self._earlier, self._parameter.grad = self._parameter.grad, None

    def add_earlier_and_move(self, parameter: Tensor) -> None:
        # Autograd would add the new gradient to the earlier one, and so copy all of its pages into memory.
        gradient, earlier = parameter.grad, self._earlier
        if gradient is not None and earlier is not None:
            for sums, added in zip(gradient.view(-1).split(_PIECE), earlier.view(-1).split(_PIECE), strict=True):
                sums.add_(added)
                release_file_pages(added.data_ptr(), added.nbytes)
            self._earlier = None
        if gradient is not None and _is_contiguous(gradient):
            parameter.grad = _in_file(gradient, self._folder)
        release_file_pages(parameter.data_ptr(), parameter.nbytes)


def _is_contiguous(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided and gradient.is_contiguous()


def _in_file(tensor: Tensor, folder: Path) -> Tensor:
    with NamedTemporaryFile(dir=folder) as file:
        tensor.view(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        values = torch.from_file(file.name, shared=False, size=tensor.numel(), dtype=tensor.dtype)
    return values.view(tensor.shape)
