"""A training step as one jitted program: a mini-batch's gradients, then torch's optimizers, number by number."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
from jax import Array
from jax import numpy as jnp

from planner.tpu.mesh_program import MeshProgram
from planner.tpu.programs import options_for
from planner.tpu.stage import StageInput

Update = Callable[[Array, Array, list[Array], Array], tuple[Array, list[Array]]]
"""(parameter, gradient, states, number of the step from 1) -> (parameter, states)."""


class State(NamedTuple):
    """What a step changes, each array with the stage in front; and what it does not."""

    trained: list[Array]
    optimizer: list[list[Array]]
    fixed: list[Array]


class TrainingStep:
    """The step of a program over a mesh: gradients, then `update`, which has so many states for each number.

    What a step draws comes from the seed and from the step's number.
    """

    def __init__(self, program: MeshProgram, update: Update, num_states: int, seed: int) -> None:
        self._program, self._update, self._num_states, self._seed = program, update, num_states, seed
        options = options_for(program.mesh.devices.flat[0])
        self._jitted = jax.jit(self._step, donate_argnums=(0,), compiler_options=options)

    def begin(self, trained: list[Array], fixed: list[Array]) -> State:
        """The state in front of the first step."""
        return State(trained, [[jnp.zeros_like(array) for array in trained] for _ in range(self._num_states)], fixed)

    def run(self, state: State, inputs: list[Array], targets: list[Array], number: int) -> tuple[float, State]:
        """Loss of a mini-batch, and the state after the optimizer's step, the `number`-th from 0."""
        loss, state = self._jitted(state, StageInput(inputs, targets, jax.random.key(self._seed)), number)
        return float(loss), state

    def lowered(self, shapes: tuple[Any, Any, StageInput]) -> jax.stages.Lowered:
        """The step, ready to be compiled for arguments of such shapes, as `MeshProgram.shapes` has them."""
        trained, fixed, batch = shapes
        state = State(trained, [list(trained) for _ in range(self._num_states)], fixed)
        return self._jitted.lower(state, batch, jax.ShapeDtypeStruct((), jnp.int32, sharding=batch.key.sharding))

    def _step(self, state: State, batch: StageInput, number: Array) -> tuple[Array, State]:
        batch = batch._replace(key=jax.random.fold_in(batch.key, number))
        loss, gradients = self._program.gradients(state.trained, state.fixed, batch)
        columns = [
            self._update(parameter, gradient, [column[n] for column in state.optimizer], number + 1)
            for n, (parameter, gradient) in enumerate(zip(state.trained, gradients, strict=True))
        ]
        optimizer = [[states[s] for _, states in columns] for s in range(self._num_states)]
        return loss, State([parameter for parameter, _ in columns], optimizer, state.fixed)


def _sgd(options: dict[str, Any]) -> Update:
    def update(parameter: Array, gradient: Array, states: list[Array], number: Array) -> tuple[Array, list[Array]]:
        gradient = gradient + options["weight_decay"] * parameter
        if not options["momentum"]:
            return parameter - options["lr"] * gradient, []
        # torch begins with the first gradient as it is.
        damped = jnp.where(number == 1, 1.0, 1.0 - options["dampening"]).astype(gradient.dtype)
        moving = options["momentum"] * states[0] + damped * gradient
        return parameter - options["lr"] * moving, [moving]

    return update


def _rmsprop(options: dict[str, Any]) -> Update:
    def update(parameter: Array, gradient: Array, states: list[Array], _number: Array) -> tuple[Array, list[Array]]:
        gradient = gradient + options["weight_decay"] * parameter
        square = options["alpha"] * states[0] + (1 - options["alpha"]) * gradient * gradient
        step = gradient / (square**0.5 + options["eps"])
        if not options["momentum"]:
            return parameter - options["lr"] * step, [square]
        moving = options["momentum"] * states[1] + step
        return parameter - options["lr"] * moving, [square, moving]

    return update


def _adam(options: dict[str, Any], *, decoupled: bool) -> Update:
    beta1, beta2 = options["betas"]

    def update(parameter: Array, gradient: Array, states: list[Array], number: Array) -> tuple[Array, list[Array]]:
        if decoupled:
            parameter = parameter * (1 - options["lr"] * options["weight_decay"])
        else:
            gradient = gradient + options["weight_decay"] * parameter
        mean = beta1 * states[0] + (1 - beta1) * gradient
        square = beta2 * states[1] + (1 - beta2) * gradient * gradient
        scale = ((1 - beta2**number) ** 0.5).astype(parameter.dtype)
        rate = (options["lr"] / (1 - beta1**number)).astype(parameter.dtype)
        return parameter - rate * mean / (square**0.5 / scale + options["eps"]), [mean, square]

    return update


UPDATES: Final[Mapping[str, tuple[Callable[[dict[str, Any]], Update], int]]] = {
    "SGD": (_sgd, 0),
    "RMSprop": (_rmsprop, 1),
    "Adam": (lambda options: _adam(options, decoupled=False), 2),
    "AdamW": (lambda options: _adam(options, decoupled=True), 2),
}
"""By the name of torch's class: what makes the update from the optimizer's options, and how many states it has, without
momentum."""
