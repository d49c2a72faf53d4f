"""An optimizer's step over some parameters as a function of JAX arrays: torch's own code, traced through torchax.

What the step finds in its state that is no array of the parameter's shape (how many steps there were, say) is taken as
it is after the first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax import Array
from torch import Tensor, nn

from planner.model.optimizers import Builder
from planner.tpu.torchax_adapter import environment, in_32_bits, shape_of

_SMALL = 2
"""Rows and columns of parameters that an optimizer is asked about its state with."""


@dataclass(frozen=True)
class StepFunction:
    """(parameters, states, gradients) -> (parameters, states), all lists; of the first two the shapes are known."""

    call: Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], tuple[list[Array], list[Array]]]
    parameters: list[jax.ShapeDtypeStruct]
    states: list[jax.ShapeDtypeStruct]


def step_function(parameters: Sequence[Tensor], build: Builder) -> StepFunction:
    """One step, not the first, over `parameters`, of which only shape and dtype count."""
    env = environment()
    small, stepped_once = _stepped(parameters, build)
    states = [
        (n, name)
        for n, p in enumerate(small)
        for name, value in stepped_once.state[p].items()
        if _is_per_number(value, p)
    ]
    shapes = [shape_of(parameter) for parameter in parameters]

    def call(
        parameters: Sequence[Array], states_: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        with in_32_bits(), env:
            parameters_here = [nn.Parameter(env.j2t_iso(array)) for array in parameters]
            for parameter, gradient in zip(parameters_here, gradients, strict=True):
                parameter.grad = env.j2t_iso(gradient)
            optimizer = build(iter(parameters_here))
            for group in optimizer.param_groups:
                # A program has no use for kernels that take several parameters at once.
                group.update({name: False for name in ("foreach", "fused") if name in group})
            for parameter, before in zip(parameters_here, small, strict=True):
                optimizer.state[parameter].update(
                    {
                        name: value.clone() if isinstance(value, Tensor) else value
                        for name, value in stepped_once.state[before].items()
                        if not _is_per_number(value, before)
                    }
                )
            for (n, name), array in zip(states, states_, strict=True):
                optimizer.state[parameters_here[n]][name] = env.j2t_iso(array)
            optimizer.step()
            stepped = [env.t2j_iso(parameter.detach()) for parameter in parameters_here]
            return stepped, [env.t2j_iso(optimizer.state[parameters_here[n]][name]) for n, name in states]

    dtypes = [shape_of(stepped_once.state[small[n]][name]).dtype for n, name in states]
    return StepFunction(
        call,
        shapes,
        [jax.ShapeDtypeStruct(shapes[n].shape, dtype) for (n, _), dtype in zip(states, dtypes, strict=True)],
    )


def _stepped(parameters: Sequence[Tensor], build: Builder) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Small parameters like these, and their optimizer after a step."""
    small = [nn.Parameter(torch.zeros((_SMALL,) * p.dim(), dtype=p.dtype)) for p in parameters]
    for parameter in small:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build(iter(small))
    optimizer.step()
    return small, optimizer


def _is_per_number(value: Any, parameter: Tensor) -> bool:
    """Whether a state has as many numbers as its parameter, one for each."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
