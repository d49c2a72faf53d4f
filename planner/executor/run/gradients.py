"""Check losses, outputs and gradients of a step, and release the memory of summed gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.core.errors import ModelError, TrainingError
from planner.executor.watch.activity import RankActivity
from planner.model.ghosts import Ghost


def check_gradients_have_values(parameters: Mapping[str, Tensor]) -> None:
    """Check that no gradient was computed from a tensor of another stage, which has no values on this rank.

    Raises:
        ModelError: A gradient has no values; the error names the parameter.
    """
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, Ghost | FakeTensor) or (gradient is not None and gradient.is_meta):
            raise ModelError(
                f'a hook on "{name}" reads a tensor that this stage does not have, such as another stage\'s parameter',
                hint="let hooks read only the gradient and tensors of the same module",
            )


def check_losses(losses: Sequence[Tensor], mean: float, activity: RankActivity) -> None:
    """Check that the loss of a step is finite.

    Args:
        losses: Losses of this rank's micro-batches.
        mean: Loss of the step.
        activity: Activity of this rank, for the message.

    Raises:
        TrainingError: The loss of a micro-batch is not finite; the error names the first such micro-batch.
    """
    if math.isfinite(mean):
        return
    micro_batch = next((n for n, loss in enumerate(losses) if not math.isfinite(float(loss))), None)
    if micro_batch is None:
        return  # the loss of another replica is not finite, and that replica reports the error
    raise TrainingError(
        f"the loss of micro-batch {micro_batch} of step {activity.step} is {float(losses[micro_batch])}, "
        f"computed on {activity.name}",
        hint="run again with `--check-nan` to find the stage that causes it; a lower learning rate or clipped "
        "gradients may help",
    )


def check_output(output: Any, activity: RankActivity) -> None:
    """Check that the output of a stage is finite.

    Raises:
        TrainingError: The output is not finite; the error names stage and micro-batch.
    """
    for tensor in (output,) if isinstance(output, Tensor) else output:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainingError(
                f"{activity.name} returned NaN or infinity {activity.where}, from finite inputs",
                hint="one of its layers overflowed, or its parameters are not finite",
            )


def check_gradients(parameters: Mapping[str, Tensor], activity: RankActivity) -> None:
    """Check that all gradients are finite.

    Raises:
        TrainingError: A gradient is not finite; the error names stage and parameter.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise TrainingError(
                f"the gradient of {name} on {activity.name} is not finite in step {activity.step}",
                hint="a lower learning rate or clipped gradients may help",
            )


def release_memory(summed: Tensor) -> None:
    """Make a tensor empty that a collective operation has summed. Other tensors in the same memory remain as they are.

    A thread of gloo refers to the tensor a little longer than the operation takes. The memory recorder of the calling
    thread would miss a release of the memory in that thread.
    """
    summed.set_()  # type: ignore[call-overload]
