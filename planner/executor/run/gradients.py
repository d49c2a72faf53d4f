"""Check that losses, outputs and gradients of a step are finite and present."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.core.errors import ModelError, TrainingError
from planner.executor.watch.position import Position
from planner.model.ghosts import Ghost


def expect_values(parameters: Mapping[str, Tensor]) -> None:
    """Refuse gradients that were computed from a tensor of another stage.

    Raises:
        ModelError: There is one; it names its parameter.
    """
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, Ghost | FakeTensor) or (gradient is not None and gradient.is_meta):
            raise ModelError(
                f'a hook on "{name}" reads a tensor that this stage does not have, such as another stage\'s parameter',
                hint="let hooks read the gradient, tensors of the same module, and nothing else",
            )


def check_losses(losses: Sequence[Tensor], mean: float, position: Position) -> None:
    """Refuse a loss that is not finite.

    Args:
        losses: Losses of this rank's micro-batches.
        mean: Loss of the step.
        position: Position of this rank, for the message.

    Raises:
        TrainingError: A loss is not finite; it names the first such micro-batch.
    """
    if math.isfinite(mean):
        return
    micro_batch = next((n for n, loss in enumerate(losses) if not math.isfinite(float(loss))), None)
    if micro_batch is None:
        return  # it is the loss of another replica, which reports it
    raise TrainingError(
        f"the loss of micro-batch {micro_batch} of step {position.step} is {float(losses[micro_batch])}, "
        f"computed on {position.name}",
        hint="run again with `--check-nan` to see in which stage it begins; a lower learning rate or clipped "
        "gradients may help",
    )


def check_output(output: Any, position: Position) -> None:
    """Refuse an output of a stage that is not finite.

    Raises:
        TrainingError: The output is not finite; it names stage and micro-batch.
    """
    for tensor in (output,) if isinstance(output, Tensor) else output:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainingError(
                f"{position.name} returned NaN or infinity {position.where}, from finite inputs",
                hint="one of its layers overflowed, or its parameters are not finite",
            )


def check_gradients(parameters: Mapping[str, Tensor], position: Position) -> None:
    """Refuse gradients that are not finite.

    Raises:
        TrainingError: There is one; it names stage and parameter.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise TrainingError(
                f"the gradient of {name} on {position.name} is not finite in step {position.step}",
                hint="a lower learning rate or clipped gradients may help",
            )
