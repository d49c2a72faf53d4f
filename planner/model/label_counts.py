"""Number of labels over which a model averages the loss that it computes itself."""

from typing import TYPE_CHECKING, Any, Final

from planner.core.errors import UsageError
from planner.core.values.profile import CountedLabels

if TYPE_CHECKING:
    from torch import Tensor

MASKED: Final = -100
"""Label that torch's and transformers' losses leave out."""


def label_count(inputs: Any, counted: CountedLabels) -> float:
    """Return the number of labels among the inputs of a micro-batch that its loss is the mean of.

    Args:
        inputs: Keyword arguments of the model, with `labels` of shape (samples, ..., tokens).
        counted: Which labels; `shifted` if the label of a token is predicted from the tokens before it.

    Raises:
        UsageError: The labels have no values here.
    """
    labels: Tensor = inputs["labels"]
    if labels.is_meta:
        raise UsageError(
            "the labels of a mini-batch are on the meta device, and the last stage counts them",
            hint="give each rank its part: `inputs, targets = pipeline.own_part(inputs, targets)`",
        )
    if counted == "shifted":
        labels = labels[..., 1:]
    return float((labels != MASKED).sum())
