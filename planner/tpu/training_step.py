"""A training step as one jitted program: a mini-batch's gradients, then the optimizer's rule."""

from typing import Any, NamedTuple

import jax
from jax import Array
from jax import numpy as jnp

from planner.tpu.mesh_program import MeshProgram
from planner.tpu.optimizers import Rule
from planner.tpu.programs import options_for
from planner.tpu.stage import StageInput


class State(NamedTuple):
    """What a step changes, each array with the stage in front; and what it does not."""

    trained: list[Array]
    optimizer: list[list[Array]]
    fixed: list[Array]


class TrainingStep:
    """The step of a program over a mesh: gradients, then the optimizer's update.

    What a step draws comes from the seed and from the step's number.
    """

    def __init__(self, program: MeshProgram, rule: Rule, seed: int) -> None:
        self._program, self._rule, self._seed = program, rule, seed
        options = options_for(program.mesh.devices.flat[0])
        self._jitted = jax.jit(self._step, donate_argnums=(0,), compiler_options=options)

    def begin(self, trained: list[Array], fixed: list[Array]) -> State:
        """The state in front of the first step."""
        return State(
            trained, [[jnp.zeros_like(array) for array in trained] for _ in range(self._rule.num_states)], fixed
        )

    def run(self, state: State, inputs: list[Array], targets: list[Array], number: int) -> tuple[float, State]:
        """Loss of a mini-batch, and the state after the optimizer's step, the `number`-th from 0."""
        loss, state = self._jitted(state, StageInput(inputs, targets, jax.random.key(self._seed)), number)
        return float(loss), state

    def lowered(self, shapes: tuple[Any, Any, StageInput]) -> jax.stages.Lowered:
        """The step, ready to be compiled for arguments of such shapes, as `MeshProgram.shapes` has them."""
        trained, fixed, batch = shapes
        state = State(trained, [list(trained) for _ in range(self._rule.num_states)], fixed)
        return self._jitted.lower(state, batch, jax.ShapeDtypeStruct((), jnp.int32, sharding=batch.key.sharding))

    def _step(self, state: State, batch: StageInput, number: Array) -> tuple[Array, State]:
        batch = batch._replace(key=jax.random.fold_in(batch.key, number))
        loss, gradients = self._program.gradients(state.trained, state.fixed, batch)
        columns = [
            self._rule.update(parameter, gradient, [column[n] for column in state.optimizer], number + 1)
            for n, (parameter, gradient) in enumerate(zip(state.trained, gradients, strict=True))
        ]
        optimizer = [[states[s] for _, states in columns] for s in range(self._rule.num_states)]
        return loss, State([parameter for parameter, _ in columns], optimizer, state.fixed)
