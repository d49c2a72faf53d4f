"""Build optimizers by name, for models without `build_optimizer`, and optimizers for a part of a model."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError, UsageError
from planner.model.module_tensors import copy_attributes

OptimizerBuilder = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerBuilder] = {
    "adafactor": torch.optim.Adafactor,
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


def optimizer_builder(user_builder: Callable[..., Any] | None, name: str) -> tuple[OptimizerBuilder, str]:
    """Return the optimizer builder and its name.

    The builder is `user_builder`, with the name `build_optimizer`. If `user_builder` is None, it is `OPTIMIZERS[name]`.

    Raises:
        UsageError: There is no optimizer of that name.
    """
    if user_builder is not None:
        return user_builder, "build_optimizer"
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer `{name}`", hint=f"one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name], name


class ParameterGroup(NamedTuple):
    """Parameter group of the whole model's optimizer."""

    options: dict[str, Any]
    parameters: list[Tensor]

    @property
    def cost_options(self) -> str:
        """Text of the options that affect the time of an update."""
        free = ("lr", "initial_lr", "weight_decay", "param_names")
        return repr(sorted((key, value) for key, value in self.options.items() if key not in free))


class WholeModelOptimizer:
    """Optimizer of a whole model, built in a process that has only some of the parameters.

    The builder gets all parameters, in the order of `model.parameters()`, so that it can select them by position.
    Parameters of other processes have a shape and no memory. They are removed from the optimizer after it is built.

    Args:
        build: Function that builds the optimizer from parameters.
        parameters: Parameters of the whole model, in the model's order. Their values are not read.
    """

    def __init__(self, build: OptimizerBuilder, parameters: Iterable[Tensor]) -> None:
        self._build = build
        self._parameters = list(parameters)
        self._positions = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        self._placeholders = [_placeholder(parameter) for parameter in self._parameters]

    def build_for(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.optim.Optimizer:
        """Return a new optimizer of some parameters of the model.

        Args:
            pairs: For each of these parameters, the parameter and the tensor to optimize in its place.

        Raises:
            ModelError: The optimizer has a tensor that is not a parameter of the model.
        """
        given: list[Tensor] = [*self._placeholders]
        kept = set()
        for parameter, tensor in pairs:
            if id(parameter) not in self._positions:
                continue  # the model's own `parameters()` leaves it out, so nothing trains it
            given[self._positions[id(parameter)]] = tensor
            kept.add(id(tensor))
            copy_attributes(parameter, tensor)
        optimizer = self._built(given)
        for group in optimizer.param_groups:
            _remove_other_parameters(group, kept)
        for tensor in given:
            if id(tensor) not in kept:
                optimizer.state.pop(tensor, None)  # some optimizers create their state when they are built
        return optimizer

    @property
    def name(self) -> str:
        """Name of the optimizer's class."""
        return type(self._built(self._placeholders)).__name__

    def groups(self) -> list[ParameterGroup]:
        """Return the parameter groups of the whole model's optimizer."""
        by_id = {id(p): original for p, original in zip(self._placeholders, self._parameters, strict=True)}
        return [
            ParameterGroup(
                {key: value for key, value in group.items() if key != "params"},
                [by_id[id(p)] for p in group["params"] if id(p) in by_id],
            )
            for group in self._built(self._placeholders).param_groups
        ]

    def _built(self, tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
        # Torch's optimizers refuse an empty list.
        tensors = tensors or [nn.Parameter(torch.zeros(0))]
        optimizer = self._build(iter(tensors))
        known = {id(tensor) for tensor in tensors}
        for tensor in (p for group in optimizer.param_groups for p in group["params"]):
            if id(tensor) not in known:
                raise ModelError(
                    f"the optimizer {type(optimizer).__name__} has a tensor of shape {list(tensor.shape)} that is "
                    "not among the `parameters` that `build_optimizer` got",
                    hint="give it only `parameters`; register a tensor that the loss learns in the model",
                )
        return optimizer


def _placeholder(parameter: Tensor) -> nn.Parameter:
    empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
    placeholder = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    copy_attributes(parameter, placeholder)
    return placeholder


def _remove_other_parameters(group: dict[str, Any], kept_ids: Collection[int]) -> None:
    # The list is changed in place, because the optimizer may have other references to it.
    chosen = [n for n, p in enumerate(group["params"]) if id(p) in kept_ids]
    for key in ("params", "param_names"):
        if key in group:
            group[key][:] = [group[key][n] for n in chosen]
