"""Weight of each micro-batch's loss in the loss of its mini-batch.

`loss_fn(output, target)` is a mean over samples, or over other items such as tokens that are not masked. For other
items, `loss_count(target)` of the model file returns their number. The weight of a micro-batch is its number of items,
divided by that of the mini-batch. If a model takes `labels` among its inputs and returns its own loss, its labels are
counted.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from planner.core.errors import ModelError
from planner.executor.run.parts import MiniBatchPart
from planner.model.nests import tensors_in
from planner.model.stand_ins import UnreadOutput
from planner.model.user_errors import explain_user_errors

UNCOUNTED: Final = object()
"""Placeholder for the targets of a micro-batch if `loss_count` returns 0, because their mean loss would be 0 / 0."""


def loss_counts(loss_count: Callable[[Any], Any], targets: Sequence[Any], source: str) -> list[float]:
    """Return, for each micro-batch, the number of items, such as labels, that its loss averages over.

    Args:
        loss_count: Function of the model file that returns the number of items for the targets of a micro-batch.
        targets: Targets of every micro-batch.
        source: File of the model, for messages.

    Raises:
        ModelError: A result is negative, infinite or not a number.
    """
    counts = []
    for target in targets:
        with explain_user_errors(source.rpartition(":")[0], "`loss_count(target)`"):
            count = float(loss_count(target))
        if not 0 <= count < float("inf"):
            raise ModelError(
                f"`loss_count` returned {count:g}, expected the number of items that the loss averages over",
                hint="for a cross-entropy over tokens: `(target != -100).sum()`",
            )
        counts.append(count)
    return counts


def loss_weights_of_parts(
    parts: Sequence[MiniBatchPart], counts: Sequence[float], total: float
) -> list[tuple[MiniBatchPart, int, list[float]]]:
    """Return each part of a mini-batch, the index of its first micro-batch, and its micro-batches' loss weights.

    Args:
        parts: Parts of a mini-batch.
        counts: Number of items that each micro-batch's loss averages over; empty on ranks without the last stage.
        total: Sum of the counts of all replicas. Weights are counts divided by this sum.

    Returns:
        Each part with the index of its first micro-batch and with its weights.
    """
    weights = [count / total if total else 0.0 for count in counts]  # zeros if no loss counts anything
    firsts = accumulate((part.micro_batches for part in parts), initial=0)
    return [(p, first, weights[first : first + p.micro_batches]) for p, first in zip(parts, firsts, strict=False)]


def sum_losses(losses: Sequence[Tensor]) -> Tensor | float:
    """Return the sum of weighted losses without waiting for the device; 0 if `losses` is empty."""
    return torch.stack(list(losses)).sum() if losses else 0.0


def zero_loss_of(output: Any) -> Tensor:
    """Return a loss of zero that depends on `output`. Its gradients are zeros."""
    tensors = [t for t in tensors_in(output) if not isinstance(t, UnreadOutput) and t.is_floating_point()]
    return torch.stack([tensor.flatten()[:0].float().sum() for tensor in tensors]).sum()
