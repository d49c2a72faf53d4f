"""What stands in for an output of the model that the loss did not read when the layers were found.

Such outputs (hidden states, attentions, encoder states) are not handed from stage to stage for the last one to return.
In their place it returns tensors that have a shape and no numbers; whatever reads one after all is told so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.core.errors import ModelError
from planner.model.ghosts import SHAPE_ONLY
from planner.model.nests import tensors_in

__all__ = ["Unread", "stand_in"]


class Unread(Tensor):
    """A tensor that cannot be read."""

    _name: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Serves those who ask for the shape alone."""
        if func._schema.name in SHAPE_ONLY:
            return func(_zeros_like(args[0]), *args[1:], **(kwargs or {}))
        name = next(tensor._name for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Unread))
        raise ModelError(
            f'the loss reads the model\'s output "{name}" ({func._schema.name}), which it did not read when the '
            "model's layers were found: the stages in front do not send it",
            hint="let `loss_fn` read the same outputs whenever it is called",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """There are no numbers to show."""
        return f"Unread({list(self.shape)}, {self.dtype}, {self.device})"


def stand_in(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Unread:
    """Stands in for the model's output called `name`."""
    unread: Unread = Tensor._make_wrapper_subclass(Unread, shape, dtype=dtype, device=device)
    unread._name = name
    return unread


def _zeros_like(unread: Unread) -> Tensor:
    return torch.zeros((), dtype=unread.dtype, device=unread.device).expand(unread.shape)
