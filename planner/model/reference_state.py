"""States of a training loop that the equivalence check compares, and their files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.model.load import LoadedModel
from planner.model.python_state import NUMBERS, file_numbers, hook_numbers, module_numbers


@dataclass(frozen=True, kw_only=True)
class ReferenceState:
    """State of a training loop at one point in the step."""

    loss: float
    tensors: Mapping[str, Tensor | None]
    """Tensors by kind and name, as in `gradient:head.weight`; None for a missing gradient."""
    numbers: Mapping[str, float]
    """Numbers that modules hold in attributes, by path; those of the model file, by module and name."""
    groups: Mapping[str, Mapping[str, float]]
    """Options of the optimizer's group, by parameter."""
    largest_gradient: float = 0.0
    """Largest absolute number in all gradients."""

    def sampled(self) -> "ReferenceState":
        """Return this state with each large tensor replaced by a sample, which suffices to verify an update."""
        return replace(self, tensors={n: None if t is None else sample_of(t) for n, t in self.tensors.items()})

    def lend_parameters(self, named: Mapping[str, Tensor]) -> None:
        """Replace the values of parameters by those of this state; their memory is that of its file.

        Args:
            named: Parameters by name; what is written into them is not written into the file.
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
        unfinished.replace(path)  # a reader finds all of it or nothing

    @classmethod
    def load(cls, path: Path) -> "ReferenceState":
        """Read a state from a file; its tensors are read from disk when they are used."""
        return cls(**torch.load(path, mmap=True, weights_only=True))


def sample_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in one dimension; of a large one a million or two, evenly spread.

    The sample of a sample is the same sample.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() >> 20)].clone()


def dense_values(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, dense."""
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def largest(tensor: Tensor) -> float:
    """Return the largest absolute number of a tensor; 0 of an empty one."""
    values = dense_values(tensor)
    if not values.numel():
        return 0.0
    if not values.is_floating_point() and not values.is_complex():
        values = values.double()
    # A norm, which makes no tensor of absolute values.
    return float(torch.linalg.vector_norm(values, math.inf))


def initial_state(loaded: LoadedModel, model: nn.Module) -> ReferenceState:
    """Return parameters, buffers and numbers."""
    tensors = {f"parameter:{name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    return ReferenceState(loss=0.0, tensors={**tensors, **_buffers(model)}, numbers=_numbers(loaded, model), groups={})


def state_after_backward(loaded: LoadedModel, model: nn.Module, loss: float) -> ReferenceState:
    """Return gradients, buffers and numbers.

    Args:
        loaded: The model as loaded.
        model: The instance that was trained.
        loss: Loss of the step.

    Returns:
        The state.
    """
    gradients = {f"gradient:{name}": p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return ReferenceState(
        loss=loss,
        tensors={**gradients, **_buffers(model)},
        numbers=_numbers(loaded, model),
        groups={},
        largest_gradient=max(
            (largest(gradient) for gradient in gradients.values() if gradient is not None), default=0.0
        ),
    )


def state_after_update(model: nn.Module, loss: float, optimizer: torch.optim.Optimizer) -> ReferenceState:
    """Return samples of parameters and of the optimizer's state.

    Args:
        model: The instance that was trained.
        loss: Loss of the step.
        optimizer: Its optimizer.

    Returns:
        The state.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors, groups = optimizer_state(optimizer, named)
    tensors |= {f"parameter:{name}": parameter for name, parameter in named.items()}
    return ReferenceState(loss=loss, tensors=tensors, numbers={}, groups=groups).sampled()


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"buffer:{name}": buffer for name, buffer in model.named_buffers(remove_duplicate=False)}


def _numbers(loaded: LoadedModel, model: nn.Module) -> dict[str, float]:
    modules = dict(model.named_modules())
    return module_numbers(modules) | hook_numbers(modules) | file_numbers(model, loaded.loss_fn)


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor | None], dict[str, dict[str, float]]]:
    """Return an optimizer's tensors and numbers by parameter and key, and the numbers of each parameter's group."""
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
