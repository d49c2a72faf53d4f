"""Torch's optimizers as elementwise update rules for JAX arrays.

A profile compiles the optimizer's step, and the JAX program runs the same step. This module does not import jax.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from planner.core.errors import UsageError
from planner.model.optimizers import OptimizerBuilder, WholeModelOptimizer

if TYPE_CHECKING:
    from jax import Array

Update = Callable[["Array", "Array", list["Array"], "Array"], tuple["Array", list["Array"]]]
"""Function (parameter, gradient, states, index of the step from 1) -> (new parameter, new states)."""


@dataclass(frozen=True)
class OptimizerRule:
    """Update rule of an optimizer that updates each element of a parameter independently."""

    update: Update
    num_states: int
    """Number of state values per parameter element."""
    description: str
    """Name and options of the optimizer."""


def optimizer_rule(build: OptimizerBuilder, parameters: Sequence[Tensor]) -> OptimizerRule:
    """Return the update rule of the optimizer that `build` returns for `parameters`.

    Raises:
        UsageError: The optimizer is not supported, has several parameter groups, or leaves out a trainable parameter.
    """
    whole = WholeModelOptimizer(build, parameters)
    name, groups = whole.name, whole.groups()
    if len(groups) > 1:
        raise UsageError(f"the JAX program supports one parameter group, but the model's {name} has several")
    ((options, optimized),) = groups
    if sum(p.requires_grad for p in optimized) < sum(p.requires_grad for p in parameters):
        raise UsageError(
            f"the JAX program trains all parameters, but the model's {name} has only some of them",
            hint="freeze the parameters that the optimizer leaves out, in `build_model`: `p.requires_grad_(False)`",
        )
    odd = [option for option in ("amsgrad", "maximize", "centered", "nesterov") if options.get(option)]
    if name not in _RULES or odd:
        text = f"{name} with {odd[0]}" if odd else name
        raise UsageError(
            f"the JAX program does not support the optimizer {text}",
            hint=f"use one of {', '.join(_RULES)}: `--optimizer`",
        )
    make, num_states = _RULES[name]
    return OptimizerRule(make(options), num_states + bool(options.get("momentum")), f"{name} {sorted(options.items())}")


def _sgd(options: Mapping[str, Any]) -> Update:
    def update(parameter: "Array", gradient: "Array", states: list["Array"], number: "Array") -> Any:
        gradient = gradient + options["weight_decay"] * parameter
        if not options["momentum"]:
            return parameter - options["lr"] * gradient, []
        # In torch the first step uses the gradient without dampening.
        damped = 1.0 - options["dampening"] * (number > 1).astype(gradient.dtype)
        moving = options["momentum"] * states[0] + damped * gradient
        return parameter - options["lr"] * moving, [moving]

    return update


def _rmsprop(options: Mapping[str, Any]) -> Update:
    def update(parameter: "Array", gradient: "Array", states: list["Array"], _number: "Array") -> Any:
        gradient = gradient + options["weight_decay"] * parameter
        square = options["alpha"] * states[0] + (1 - options["alpha"]) * gradient * gradient
        step = gradient / (square**0.5 + options["eps"])
        if not options["momentum"]:
            return parameter - options["lr"] * step, [square]
        moving = options["momentum"] * states[1] + step
        return parameter - options["lr"] * moving, [square, moving]

    return update


def _adam(options: Mapping[str, Any]) -> Update:
    beta1, beta2 = options["betas"]

    def update(parameter: "Array", gradient: "Array", states: list["Array"], number: "Array") -> Any:
        if options["decoupled_weight_decay"]:
            parameter = parameter * (1 - options["lr"] * options["weight_decay"])
        else:
            gradient = gradient + options["weight_decay"] * parameter
        mean = beta1 * states[0] + (1 - beta1) * gradient
        square = beta2 * states[1] + (1 - beta2) * gradient * gradient
        scale = ((1 - beta2**number) ** 0.5).astype(parameter.dtype)
        rate = (options["lr"] / (1 - beta1**number)).astype(parameter.dtype)
        return parameter - rate * mean / (square**0.5 / scale + options["eps"]), [mean, square]

    return update


_RULES: Final[Mapping[str, tuple[Callable[[Mapping[str, Any]], Update], int]]] = {
    "SGD": (_sgd, 0),
    "RMSprop": (_rmsprop, 1),
    "Adam": (_adam, 2),
    "AdamW": (_adam, 2),
}
"""Supported optimizers by torch class name: function that returns the update, and number of states per element.

Momentum adds one state to SGD and RMSprop.
"""
