"""State of the reference training loop, saved to files: the equivalence check compares it with that of the stages."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planner.model.load import LoadedModel
from planner.model.python_state import NUMBERS, numbers_in_attributes, numbers_in_hooks, numbers_in_user_files

END = "end"
"""File that is written after the last step."""

_POLL_S = 0.01


class BackwardEffects(NamedTuple):
    """Effects of the backwards of a step, apart from gradients."""

    changed: str
    """Name of a buffer or frozen parameter that a backward changed; empty if there is none."""
    runs_model_code: bool
    """True if a backward ran code of the model, such as hooks and autograd functions."""


@dataclass(frozen=True, kw_only=True)
class ReferenceState:
    """State of a training loop at one point in a step."""

    loss: float
    tensors: Mapping[str, Tensor | None]
    """Tensors by kind and name, such as `gradient:head.weight`; None for a missing gradient."""
    numbers: Mapping[str, float]
    """Python numbers in attributes and hooks of the model's modules, and in variables of the user's files."""
    groups: Mapping[str, Mapping[str, float]]
    """For each parameter, the numeric options of its group in the optimizer."""
    largest_gradient: float = 0.0
    """Largest absolute value in all gradients."""
    changed_by_backward: str = ""
    """Name of a buffer or frozen parameter that a backward of this step changed; empty if there is none."""
    backward_runs_model_code: bool = False
    """True if a backward of this step ran code of the model, such as hooks and autograd functions."""

    def use_as_parameters(self, named: Mapping[str, Tensor]) -> None:
        """Replace the data of parameters with this state's tensors, which must be loaded from a file.

        `named` has the parameters by name. Later writes into the parameters do not change the file.
        """
        for name, parameter in named.items():
            values = self.tensors[f"parameter:{name}"]
            assert values is not None
            parameter.data = values

    def save(self, path: Path) -> None:
        """Write this state to a file."""
        tensors = {name: None if tensor is None else tensor.detach() for name, tensor in self.tensors.items()}
        unfinished = path.with_suffix(".unfinished")
        torch.save({**vars(self), "tensors": tensors}, unfinished)
        unfinished.replace(path)  # a reader finds a complete file or none

    @classmethod
    def load(cls, path: Path) -> "ReferenceState":
        """Read a state from a file. Its tensors are read from disk when they are used."""
        # A process of this check wrote the file in its own folder. `weights_only=True` takes more than twice as long.
        return cls(**torch.load(path, mmap=True, weights_only=False))


def wait_for_state(folder: Path, name: str) -> bool:
    """Wait for the state `name` of the reference training. Return False if the training ended without writing it."""
    path, end = folder / name, folder / END
    while not path.exists():
        if end.exists():
            return path.exists()  # the reference may have written both files since the first look
        time.sleep(_POLL_S)
    return True


def sampled_values(tensor: Tensor) -> Tensor:
    """Return a tensor's values in one dimension; of a large tensor, one to two million evenly spaced values."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() >> 20)].clone()


def dense_values(tensor: Tensor) -> Tensor:
    """Return a tensor as a dense tensor without autograd graph."""
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value in a tensor; 0 if it is empty."""
    values = dense_values(tensor)
    if not values.numel():
        return 0.0
    if values.is_complex():
        values = values.abs()
    elif not values.is_floating_point():
        values = values.double()
    # On a CPU, `aminmax` takes a tenth of the time of an infinity norm, and like it makes no tensor of absolute values.
    least, most = torch.aminmax(values)
    return max(abs(float(least)), abs(float(most)))


def initial_state(loaded: LoadedModel, model: nn.Module) -> ReferenceState:
    """Return the state of `model` before the first step: parameters, buffers and Python numbers."""
    tensors = {f"parameter:{name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    return ReferenceState(loss=0.0, tensors={**tensors, **_buffers(model)}, numbers=_numbers(loaded, model), groups={})


def state_after_backward(
    loaded: LoadedModel, model: nn.Module, loss: float, backward: BackwardEffects
) -> ReferenceState:
    """Return the state after a backward: gradients, buffers and Python numbers.

    Args:
        loaded: Loaded model file, for its loss function.
        model: Instance that is trained.
        loss: Loss of the step.
        backward: Effects of the backwards of the step, apart from gradients.
    """
    gradients = {f"gradient:{name}": p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return ReferenceState(
        loss=loss,
        tensors={**gradients, **_buffers(model)},
        numbers=_numbers(loaded, model),
        groups={},
        largest_gradient=max(
            (largest_magnitude(gradient) for gradient in gradients.values() if gradient is not None), default=0.0
        ),
        changed_by_backward=backward.changed,
        backward_runs_model_code=backward.runs_model_code,
    )


def state_after_update(model: nn.Module, loss: float, optimizer: torch.optim.Optimizer) -> ReferenceState:
    """Return parameters and optimizer state after an update; of large tensors, only some values (`sampled_values`).

    Args:
        model: Instance that is trained.
        loss: Loss of the step.
        optimizer: Optimizer of the instance.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors, groups = optimizer_state(optimizer, named)
    tensors |= {f"parameter:{name}": parameter for name, parameter in named.items()}
    samples = {name: None if tensor is None else sampled_values(tensor) for name, tensor in tensors.items()}
    return ReferenceState(loss=loss, tensors=samples, numbers={}, groups=groups)


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"buffer:{name}": buffer for name, buffer in model.named_buffers(remove_duplicate=False)}


def _numbers(loaded: LoadedModel, model: nn.Module) -> dict[str, float]:
    modules = dict(model.named_modules())
    return numbers_in_attributes(modules) | numbers_in_hooks(modules) | numbers_in_user_files(model, loaded.loss_fn)


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor | None], dict[str, dict[str, float]]]:
    """Return an optimizer's state for `named` parameters, and the numeric options of each parameter's group.

    Keys of the state are `optimizer:PARAMETER:KEY`.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), []).append(name)
    tensors: dict[str, Tensor | None] = {}
    groups: dict[str, dict[str, float]] = {}
    for group in optimizer.param_groups:
        options = {key: float(value) for key, value in group.items() if type(value) in NUMBERS}
        named_here = [(name, p) for p in group["params"] for name in names.get(id(p), ())]
        for name, parameter in named_here:
            groups[name] = options
            state = optimizer.state.get(parameter, {}).items()
            kept = {key: value for key, value in state if isinstance(value, Tensor | int | float)}
            tensors |= {f"optimizer:{name}:{key}": torch.as_tensor(value) for key, value in kept.items()}
    return tensors, groups
