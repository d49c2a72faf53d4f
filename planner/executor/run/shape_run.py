"""Running layers for the shapes and dtypes of what they return, without values.

Without autocast the meta device will do. Autocast does nothing there: its rules belong to devices. Fake tensors have a
device, and no memory either.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.core.values.precision import Precision
from planner.model.autocast import layers_in

__all__ = ["FakeRun", "MetaRun"]


class MetaRun:
    """Layers on the meta device, as they are."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the meta device, for a layer to be called with: no leaf."""
        return tensor.clone()

    def context(self) -> AbstractContextManager[Any]:
        """Where a layer must be called."""
        return nullcontext()


class FakeRun(MetaRun):
    """Layers from the meta device with fake parameters on `device`, under autocast."""

    def __init__(self, layers: Sequence[nn.Module], precision: Precision, device: torch.device) -> None:
        self._precision, self._device = precision, device
        self._mode = FakeTensorMode()
        tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        # One copy of all, so that what is tied stays tied.
        self.layers = list(copy.deepcopy(nn.ModuleList(layers), {id(tensor): self._fake(tensor) for tensor in tensors}))

    def copy(self, tensor: Tensor) -> Tensor:
        """As above, on the device."""
        with self._mode:
            return self._fake(tensor).clone()

    def context(self) -> AbstractContextManager[Any]:
        """As above."""
        stack = ExitStack()
        stack.enter_context(self._mode)
        stack.enter_context(layers_in(self._precision, self._device))
        return stack

    def _fake(self, tensor: Tensor) -> Tensor:
        with self._mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
            return fake.requires_grad_(tensor.requires_grad)
