"""Stage of consecutive layers on one device. Each layer has a separate forward and backward (`layer_functions`).

Recomputed layers keep only their inputs. Writes of layers into buffers (running statistics) are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
from jax import numpy as jnp

from planner.tpu.layer_functions import ForwardBackwardFunction, LayerFunction

State = tuple[dict[str, Array], dict[str, Array]]
"""Trained parameters, then frozen parameters and buffers, of a layer or stage, by name."""


class StageInput(NamedTuple):
    """Arrays that a stage reads for one micro-batch."""

    inputs: Sequence[Array]
    targets: Sequence[Array]
    """Targets of the loss; only the last stage reads them."""
    key: Array
    """Random key of the micro-batch."""


@dataclass(frozen=True)
class StageLayer:
    """Layer of a stage, and the names of the layer's parameters and buffers in the stage."""

    number: int
    """Index in the chain."""
    names: dict[str, str]
    """Mapping from the layer's names of parameters and buffers to the stage's names."""
    function: LayerFunction
    split: ForwardBackwardFunction
    recomputed: bool

    def select_state(self, trained: dict[str, Array], fixed: dict[str, Array]) -> State:
        """Return the layer's part of the stage's arrays. `fixed` has frozen parameters and buffers."""
        return (
            {name: trained[self.names[name]] for name in self.function.trained},
            {name: fixed[self.names[name]] for name in self.function.fixed},
        )


class JaxStage:
    """Stage of consecutive layers on one device.

    Args:
        layers: Layers of the stage.
        num_inputs: Number of received tensors, without targets of the loss.
        recompute: True if the stage keeps only its inputs for the backward.
    """

    def __init__(self, layers: Sequence[StageLayer], num_inputs: int, *, recompute: bool) -> None:
        self._layers, self._recompute = layers, recompute
        self.inputs = list(layers[0].function.inputs[:num_inputs])
        self.outputs = list(layers[-1].split.outputs)
        self.trained = {layer.names[name]: s for layer in layers for name, s in layer.function.trained.items()}
        self.fixed = {layer.names[name]: s for layer in layers for name, s in layer.function.fixed.items()}
        self._needed = [] if recompute else self._tensors_read_between_layers()
        boundaries = [self._between(boundary)[n] for boundary, n in self._needed]
        created = [
            s for layer in layers if not (recompute or layer.recomputed) for s in layer.split.made_residual_shapes
        ]
        self.kept: list[jax.ShapeDtypeStruct] = [*boundaries, *created]
        """Shapes of the arrays that the forward keeps, without the stage's inputs."""

    def forward(self, state: State, received: StageInput) -> tuple[list[Array], list[Array]]:
        """Return the outputs, and the arrays that the backward reads."""
        values, created = self._run(state, received)
        between = [values[place][n] for place, n in self._needed]
        if self._recompute:
            return values[-1], []
        kept = [
            array
            for layer, arrays in zip(self._layers, created, strict=True)
            if not layer.recomputed
            for array in arrays
        ]
        return values[-1], [*between, *kept]

    def backward(
        self, state: State, received: StageInput, saved: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[dict[str, Array], list[Array]]:
        """Return gradients of a stage's trained parameters, by name, and of its inputs that need a gradient.

        Args:
            state: Parameters and buffers of the stage.
            received: Inputs of the micro-batch.
            saved: Arrays that the forward returned for the backward.
            gradients: Gradients of the outputs.
        """
        values, created = self._run(state, received) if self._recompute else self._unpacked(received.inputs, saved)
        of_trained: dict[str, Array] = {}
        flowing = list(gradients)
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            arguments = self._arguments(place, state, values[place], received)
            outputs, new = values[place + 1], created[place]
            if layer.recomputed and not self._recompute:
                outputs, new = layer.split.forward(*arguments)
            pulled, flowing = layer.split.backward(arguments, outputs, new, flowing)
            for name, gradient in pulled.items():
                earlier = of_trained.get(layer.names[name])
                of_trained[layer.names[name]] = gradient if earlier is None else earlier + gradient
        return of_trained, flowing

    def _run(self, state: State, received: StageInput) -> tuple[list[list[Array]], list[list[Array]]]:
        values, created = [list(received.inputs)], []
        for place, layer in enumerate(self._layers):
            outputs, new = layer.split.forward(*self._arguments(place, state, values[-1], received))
            values.append(list(outputs))
            created.append(list(new))
        return values, created

    def _arguments(self, place: int, state: State, values: Sequence[Array], received: StageInput) -> tuple[Any, ...]:
        layer = self._layers[place]
        # The targets of the loss are inputs of the last layer.
        more = len(layer.function.inputs) - len(values)
        key = jax.random.fold_in(received.key, layer.number)
        return (*layer.select_state(*state), [*values, *received.targets[:more]], key)

    def _tensors_read_between_layers(self) -> list[tuple[int, int]]:
        """Return (boundary, index) of each tensor between layers that some backward reads.

        Tensors that layers only pass on are listed once, at the boundary where they are made.
        """
        needed: dict[tuple[int, int], None] = {}
        for place, layer in enumerate(self._layers):
            tensors = range(len(self._between(place)))
            tensors_read: list[tuple[str, int | str]] = [("input", n) for n in tensors] if layer.recomputed else []
            tensors_read += [(r.kind, r.index) for r in layer.split.residuals if not layer.recomputed]
            for kind, n in tensors_read:
                if kind in ("input", "output") and (kind == "output" or n in tensors):
                    needed[self._origin_of(place + (kind == "output"), int(n))] = None
        return [tensor for tensor in needed if tensor[0] > 0]

    def _origin_of(self, boundary: int, n: int) -> tuple[int, int]:
        while boundary > 0 and self._layers[boundary - 1].split.passed[n] >= 0:
            boundary, n = boundary - 1, self._layers[boundary - 1].split.passed[n]
        return boundary, n

    def _between(self, boundary: int) -> list[jax.ShapeDtypeStruct]:
        return self.inputs if boundary == 0 else self._layers[boundary - 1].split.outputs

    def _unpacked(self, inputs: Sequence[Array], saved: Sequence[Array]) -> tuple[list[list[Array]], list[list[Array]]]:
        # Placeholder for values that no backward reads.
        nothing = jnp.zeros(())
        earlier = dict(zip(self._needed, saved, strict=False)) | {(0, n): value for n, value in enumerate(inputs)}
        values = [
            [earlier.get(self._origin_of(b, n), nothing) for n in range(len(self._between(b)))]
            for b in range(len(self._layers) + 1)
        ]
        rest = iter(saved[len(self._needed) :])
        created = [
            [] if layer.recomputed else [next(rest) for _ in layer.split.made_residual_shapes] for layer in self._layers
        ]
        return values, created
