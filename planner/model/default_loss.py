"""Choose a loss if the user's file has no `loss_fn`: the output's `.loss`, its only scalar, or its mean.

The first output decides, and the choice is kept for all later outputs. Two scalars that could be the loss are an error.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from planner.core.errors import ModelError
from planner.model.nests import flatten, leaf_names, tensors_in

_OWN: Final = object()
_MEAN: Final = object()

_HINT = "define `loss_fn(output, target)` that returns the one to train"


class DefaultLoss:
    """Loss of a model whose file `path` has no `loss_fn`.

    The loss is the output's `.loss`, else the only scalar in the output, else the mean of the output.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._taken: object = None

    def __call__(self, output: Any, _target: Any) -> Tensor:
        """Return the loss in a model's output.

        Raises:
            ModelError: The output has no loss, or several possible ones, or lacks the loss that the first output had.
        """
        if self._taken is None:
            self._taken = self._chosen(output)
        if self._taken is _OWN:
            return self._present(_own_loss(output), "`.loss`")
        if self._taken is _MEAN:
            floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            return torch.stack([tensor.float().mean() for tensor in floats]).mean()
        leaves, nest = flatten(output)
        return self._present(dict(zip(leaf_names(nest), leaves, strict=True)).get(str(self._taken)), self._described)

    @property
    def note(self) -> str:
        """Note for the user that names the chosen loss; empty until it is chosen."""
        if self._taken is None:
            return ""
        return f"{self._path} has no `loss_fn(output, target)`: {self._described} is trained"

    @property
    def _described(self) -> str:
        if self._taken is _OWN:
            return "the output's own `.loss`"
        if self._taken is _MEAN:
            return "the mean of the model's output, which holds no scalar,"
        if not self._taken:
            return "the model's output, a scalar,"
        return f'the model\'s output "{self._taken}", the only scalar with a gradient,'

    def _chosen(self, output: Any) -> object:
        loss = _own_loss(output)
        if loss is not None:
            if loss.numel() != 1:
                raise self._unclear(f"the output's own `.loss` has shape {list(loss.shape)}, expected a scalar")
            return _OWN
        leaves, nest = flatten(output)
        named = zip(leaf_names(nest), leaves, strict=True)
        floats = {name: leaf for name, leaf in named if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        if not floats:
            raise ModelError(
                "the model's output holds no floating-point tensor", hint="define `loss_fn(output, target)`"
            )
        scalars = [name for name, leaf in floats.items() if _is_scalar(leaf, list(floats.values()))]
        carrying = [name for name in scalars if floats[name].requires_grad]
        if not any(leaf.requires_grad for leaf in floats.values()):  # gradients are disabled
            carrying = scalars
        if len(carrying) > 1:
            names = ", ".join(f'"{name}"' for name in carrying)
            raise self._unclear(f"the model returns {len(carrying)} scalars that could be the loss: {names}")
        if scalars and not carrying:
            names = ", ".join(f'"{name}"' for name in scalars)
            raise self._unclear(f"the scalars that the model returns carry no gradient: {names}")
        return carrying[0] if carrying else _MEAN

    def _unclear(self, why: str) -> ModelError:
        return ModelError(f"{self._path} has no `loss_fn(output, target)`, and {why}", hint=_HINT)

    def _present(self, loss: Any, described: str) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"{described} is trained as the loss, but a later output does not have it",
                hint="let the model return the same structure whenever it is called, or define `loss_fn`",
            )
        return loss


def _own_loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _is_scalar(tensor: Tensor, beside: Sequence[Tensor]) -> bool:
    # A tensor of shape (1,) or (1, 1) may be the output for one sample, unless another tensor has several samples.
    of_several = any(other.numel() and other.shape[:1] > (1,) for other in beside)
    return tensor.ndim == 0 or (tensor.numel() == 1 and of_several)
