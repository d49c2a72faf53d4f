"""The gradients of all stages, clipped as those of one model."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.core.errors import ModelError

__all__ = ["clip_gradients", "dense_part", "expect_dense"]


def expect_dense(gradients: Iterable[Tensor], summed_over: str) -> None:
    """Refuses sparse gradients where they would have to be summed.

    Raises:
        ModelError: One is sparse.
    """
    if any(gradient.is_sparse for gradient in gradients):
        raise ModelError(
            f"a gradient is sparse, and cannot be summed over {summed_over}",
            hint="build the layer with `sparse=False`, or solve without replicas",
        )


def dense_part(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, those that a sparse one has of the same row added up; norms are those of the whole."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    device: torch.device,
    *,
    counted_elsewhere: Iterable[nn.Parameter] = (),
    group: dist.ProcessGroup | None = None,
) -> float:
    """`torch.nn.utils.clip_grad_norm_` for the whole model; every process of `group` must call it.

    Args:
        parameters: The parameters of this process.
        max_norm: The largest norm of all gradients together (Euclidean); where it is larger, all are made smaller.
        device: Where they are.
        counted_elsewhere: What another process holds, too, and counts.
        group: The processes of one pipeline; by default all there are.

    Returns:
        The norm before clipping.
    """
    skipped = {id(parameter) for parameter in counted_elsewhere}
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    counted = [dense_part(p.grad) for p in trained if p.grad is not None and id(p) not in skipped]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        squares = torch.nn.utils.get_total_norm(counted).double().square()
    dist.all_reduce(squares, group=group)
    norm: Tensor = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm.float())
    return float(norm)
