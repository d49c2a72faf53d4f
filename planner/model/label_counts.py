"""Count the labels over which a model averages the loss that it computes itself."""

from typing import TYPE_CHECKING, Any, Final

from planner.core.errors import UsageError
from planner.core.values.profile import CountedLabels

if TYPE_CHECKING:
    from torch import Tensor

MASKED: Final = -100
"""Label that the losses of torch and transformers ignore."""


def label_count(inputs: Any, counted_labels: CountedLabels) -> float:
    """Return the number of labels in a micro-batch over which the model averages its loss.

    `inputs` are keyword arguments of the model, with `labels` of shape (samples, ..., tokens). If `counted_labels` is
    `shifted`, the first label of each sample does not count, because a token is predicted from the tokens before it.

    Raises:
        UsageError: The labels are on the meta device and have no values.
    """
    labels: Tensor = inputs["labels"]
    if labels.is_meta:
        raise UsageError(
            "the labels of a mini-batch are on the meta device, and the last stage counts them",
            hint="give each rank its part: `inputs, targets = pipeline.own_part(inputs, targets)`",
        )
    if counted_labels == "shifted":
        labels = labels[..., 1:]
    return float((labels != MASKED).sum())
