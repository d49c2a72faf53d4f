"""Check that losses, outputs and gradients of a step are finite, and that gradients have values."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.core.errors import ModelError, TrainingError, UsageError
from planner.executor.watch.activity import RankActivity
from planner.model.ghosts import Ghost


def check_gradients_have_values(parameters: Mapping[str, Tensor]) -> None:
    """Check that the gradients of all parameters have values.

    Raises:
        ModelError: A gradient was computed from a tensor of another stage, which has no values on this rank.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None and _has_no_values(parameter.grad):
            raise ModelError(
                f'a hook on "{name}" reads a tensor that this stage does not have, such as another stage\'s parameter',
                hint="let hooks read only the gradient and tensors of the same module",
            )


def check_gradient_has_values(gradient: Tensor) -> None:
    """Check that the gradient of a received tensor has values to send to the previous stage.

    Raises:
        ModelError: The gradient was computed from a tensor of another stage, which has no values on this rank.
    """
    if _has_no_values(gradient):
        origin = getattr(gradient, "origin", "a tensor")
        raise ModelError(
            f'a backward reads "{origin}", which this stage does not have, because its forward does not read it',
            hint="let an autograd function, or the code that registers a hook, be in a module that has the tensor",
        )


def _has_no_values(tensor: Tensor) -> bool:
    return isinstance(tensor, Ghost | FakeTensor) or tensor.is_meta


def check_losses(losses: Sequence[Tensor], mean: float, activity: RankActivity) -> None:
    """Check that the loss of a step is finite.

    Args:
        losses: Losses of this rank's micro-batches.
        mean: Loss of the step.
        activity: Stage and micro-batch that this rank runs, for the message.

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


def check_output_is_finite(output: Any, activity: RankActivity) -> None:
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


def check_gradients_are_finite(parameters: Mapping[str, Tensor], activity: RankActivity) -> None:
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
    """Make a tensor empty, which releases its memory."""
    # A thread of gloo refers to the tensor longer than its collective operation takes. If that thread released the
    # memory, the memory recorder of the calling thread would miss it.
    summed.set_()  # type: ignore[call-overload]


@contextmanager
def refuse_norm_of_own_gradients(parameters: Mapping[str, Tensor], layers: Sequence[str]) -> Iterator[None]:
    """Refuse `torch.nn.utils.clip_grad_norm_` in the `with` block if its norm lacks gradients of other ranks.

    `parameters` are this rank's parameters by name, and `layers` the names of its layers.
    """
    whole_norm = torch.nn.utils.get_total_norm

    def checked_norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        names = {id(p.grad): name for name, p in parameters.items() if p.grad is not None}
        clipped = [names[id(tensor)] for tensor in given if id(tensor) in names]
        # Allow one gradient, and also several gradients of one layer, unless they are all gradients of this rank.
        if len(clipped) > 1 and (len(clipped) == len(names) or len({_layer_of(name, layers) for name in clipped}) > 1):
            raise UsageError(
                f"`clip_grad_norm_` gets {len(clipped)} gradients of this rank, but other ranks have the gradients of "
                "their stages: each rank would clip by another norm",
                hint="clip with `pipeline.clip_gradients(max_norm)`, which uses the norm over all stages",
            )
        return whole_norm(given, *args, **kwargs)

    # `clip_grad_norm_` finds the function of the norm in its module, also if the script has imported it earlier.
    module = sys.modules[whole_norm.__module__]
    names = [name for name, held in vars(module).items() if held is whole_norm]
    for name in names:
        setattr(module, name, checked_norm)
    try:
        yield
    finally:
        for name in names:
            setattr(module, name, whole_norm)


def _layer_of(name: str, layers: Sequence[str]) -> str:
    owners = [layer for layer in layers if f"{name}.".startswith(f"{layer}.")]
    return max(owners, key=len, default=name)
