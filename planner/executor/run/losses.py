"""What each micro-batch's loss counts for in that of its mini-batch.

`loss_fn(output, target)` is a mean: over samples, unless the model file's `loss_count(target)` says over how many
things (tokens that are not masked, say). The loss of a mini-batch is then the mean over all things in it, so a
micro-batch counts for its part of them. A model that takes `labels` among its inputs and returns its own loss has no
targets: then labels are counted.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from planner.core.errors import ModelError
from planner.executor.run.parts import Part
from planner.model.nests import tensors_in
from planner.model.stand_ins import Unread
from planner.model.user_errors import user_code

UNCOUNTED: Final = object()
"""Takes the place of targets that nothing is to be counted of, whose mean would be 0 / 0."""


def loss_counts(loss_count: Callable[[Any], Any], targets: Sequence[Any], source: str) -> list[float]:
    """What the `loss_count` of a model file says of the targets of every micro-batch.

    Raises:
        ModelError: It did not say a number of things.
    """
    counts = []
    for target in targets:
        with user_code(source.rpartition(":")[0], "`loss_count(target)`"):
            count = float(loss_count(target))
        if not 0 <= count < float("inf"):
            raise ModelError(
                f"`loss_count` returned {count:g}, expected how many things the loss of a micro-batch is the mean of",
                hint="for a cross-entropy over tokens: `(target != -100).sum()`",
            )
        counts.append(count)
    return counts


def weights_of(counts: Sequence[float], total: float) -> list[float]:
    """Return the part of each count in the total of all replicas; all zero if the total is."""
    return [count / total if total else 0.0 for count in counts]


def weighted(parts: Sequence[Part], counts: Sequence[float], total: float) -> list[tuple[Part, int, list[float]]]:
    """Return each part, which micro-batch it begins with, and what the loss of each of its micro-batches counts for.

    Args:
        parts: Of a mini-batch.
        counts: What the loss of each micro-batch is a mean of, as a number; empty but with the last stage.
        total: Sum of the counts of all replicas, whose losses together count for one.
    """
    weights = weights_of(counts, total)
    firsts = accumulate((part.micro_batches for part in parts), initial=0)
    return [(p, first, weights[first : first + p.micro_batches]) for p, first in zip(parts, firsts, strict=False)]


def sum_of(losses: Sequence[Tensor]) -> Tensor | float:
    """What weighted losses come to, without waiting for the device; 0 where there are none."""
    return torch.stack(list(losses)).sum() if losses else 0.0


def nothing_of(output: Any) -> Tensor:
    """A loss of zero whose gradient is zero, whatever the output."""
    tensors = [t for t in tensors_in(output) if not isinstance(t, Unread) and t.is_floating_point()]
    return torch.stack([tensor.flatten()[:0].float().sum() for tensor in tensors]).sum()
