"""What a step came to: losses, outputs and gradients that must be finite."""

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
        ModelError: One was; names its parameter.
    """
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, Ghost | FakeTensor) or (gradient is not None and gradient.is_meta):
            raise ModelError(
                f'a hook on "{name}" reads a tensor that this stage does not have, such as another stage\'s parameter',
                hint="let hooks read the gradient, tensors of the same module, and nothing else",
            )


def check_losses(losses: Sequence[Tensor], mean: float, position: Position) -> None:
    """Refuses to train on with a loss that is no number.

    Raises:
        TrainingError: Naming the first micro-batch whose loss is not finite.
    """
    if math.isfinite(mean):
        return
    micro_batch = next((n for n, loss in enumerate(losses) if not math.isfinite(float(loss))), None)
    if micro_batch is None:
        return  # it is another replica's, which tells it
    raise TrainingError(
        f"the loss of micro-batch {micro_batch} of step {position.step} is {float(losses[micro_batch])}, "
        f"computed on {position.name}",
        hint="run again with `--check-nan` to see in which stage it begins; a lower learning rate or clipped "
        "gradients may help",
    )


def check_output(output: Any, position: Position) -> None:
    """Refuses an output of a stage that is not finite.

    Raises:
        TrainingError: Naming stage and micro-batch.
    """
    for tensor in (output,) if isinstance(output, Tensor) else output:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainingError(
                f"{position.name} put out NaN or infinity {position.where}, from finite inputs",
                hint="one of its layers overflowed, or its parameters are not finite",
            )


def check_gradients(parameters: Mapping[str, Tensor], position: Position) -> None:
    """Refuses gradients that are not finite.

    Raises:
        TrainingError: Naming stage and parameter.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise TrainingError(
                f"the gradient of {name} on {position.name} is not finite in step {position.step}",
                hint="a lower learning rate or clipped gradients may help",
            )
