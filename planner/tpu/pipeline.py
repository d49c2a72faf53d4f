"""Pipeline of a plan as one JAX program (`planner.tpu.mesh_program`), made from a model's layers and tensors."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.core.errors import UsageError
from planner.core.values.balance import Balance
from planner.executor.run.parts import micro_batches_of, tensors_in_value
from planner.model.chain import Chain, Layer
from planner.model.label_counts import label_count
from planner.model.load import LoadedModel
from planner.model.stage import ModelStage
from planner.tpu.layer_functions import LayerFunction, layer_function, split_layer
from planner.tpu.mesh_program import MeshProgram
from planner.tpu.stage import JaxStage, StageLayer
from planner.tpu.torchax_adapter import jax_shape_of, torch_like


class JaxPipeline:
    """Pipeline of a model's stages as one JAX program over a mesh, with one stage per device.

    Args:
        loaded: Loaded model file.
        chain: Layers of the model, which hold the parameters.
        balance: Cuts and micro-batches of the plan.
        devices: JAX devices, one per stage.

    Raises:
        UsageError: One JAX program cannot run the plan.
    """

    def __init__(self, loaded: LoadedModel, chain: Chain, balance: Balance, devices: Sequence[Any]) -> None:
        if loaded.loss_count is not None:
            raise UsageError(
                "the JAX program takes the mean of the micro-batches' losses, but the model defines `loss_count`",
                hint="emit for the bundled executor: `--format native`",
            )
        self._counted_labels = loaded.counted_labels
        self._chain, self._cuts = chain, list(pairwise(accumulate(balance.balance, initial=0)))
        batch = loaded.example_batch(balance.batch // balance.micro_batches)
        self._inputs, self._targets = ([jax_shape_of(tensor) for tensor in tensors_in_value(nest)] for nest in batch)
        self.program = MeshProgram(_stages(loaded, chain, balance, batch), devices, balance.micro_batches)
        self.loss_and_gradients = self.program.loss_and_gradients

    def parameters(self) -> tuple[list[Any], list[Any]]:
        """Return two lists of packed arrays on the devices: trained parameters, and frozen parameters and buffers."""
        program = self.program
        trained = [self._state(k, stage.trained) for k, stage in enumerate(program.stages)]
        fixed = [self._state(k, stage.fixed) for k, stage in enumerate(program.stages)]
        return program.place_on_devices(program.trained, trained), program.place_on_devices(program.fixed, fixed)

    def split_batch(self, inputs: Any, targets: Any) -> tuple[list[Any], list[Any]]:
        """Return inputs and targets of a mini-batch on every device, as arrays of shape (micro-batch, sample, …).

        Raises:
            UsageError: The loss is a mean over labels, and the micro-batches have different numbers of labels.
        """
        if self._counted_labels:
            micro_batches = micro_batches_of(inputs, self.program.micro_batches)
            counts = {label_count(each, self._counted_labels) for each in micro_batches}
            if len(counts) > 1:
                raise UsageError(
                    f"micro-batches have between {min(counts):g} and {max(counts):g} labels, but the JAX program takes "
                    "the mean of their losses",
                    hint="emit for the bundled executor: `--format native`",
                )
        return self._split(inputs), self._split(targets)

    def argument_shapes(self) -> tuple[Any, ...]:
        """Return shapes and shardings of the arguments of `loss_and_gradients`."""
        return self.program.argument_shapes(self._inputs, self._targets)

    def arrays_by_name(self, packed: Sequence[Any]) -> dict[str, Any]:
        """Return packed trained parameters (or their gradients) as numpy arrays, by parameter name in the model."""
        arrays = self.program.copy_to_host(self.program.trained, packed)
        stages = zip(self.program.stages, arrays, strict=True)
        return {name: array for stage, held in stages for name, array in zip(stage.trained, held, strict=True)}

    def _state(self, k: int, names: Iterable[str]) -> list[Any]:
        layers = self._chain.layers[slice(*self._cuts[k])]
        tensors = {name: tensor for layer in layers for name, tensor in _tensors_in_model(layer).items()}
        return [_as_numpy(tensors[name]) for name in names]

    def _split(self, value: Any) -> list[Any]:
        pieces = (
            tensor.reshape(self.program.micro_batches, -1, *tensor.shape[1:]) for tensor in tensors_in_value(value)
        )
        return self.program.copy_to_all_devices(map(_as_numpy, pieces))


def _stages(loaded: LoadedModel, chain: Chain, balance: Balance, batch: Any) -> list[JaxStage]:
    leaves, nest = tree_flatten(batch.inputs)
    values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    stages, number = [], 0
    owners: dict[int, tuple[int, str]] = {}
    for k, cut in enumerate(balance.stages):
        layers = []
        num_inputs = sum(isinstance(value, Tensor) for value in values)
        for layer in chain.layers[number : number + len(cut.layers)]:
            last = number == len(chain.layers) - 1
            function, after = _layer_function_of(
                loaded, layer, values, nest, targets=batch.targets if last else None, last=last
            )
            split = split_layer(function)
            names = _stage_names(layer, k, owners)
            layers.append(StageLayer(number, names, function, split, layer.name in cut.recomputed))
            nest, places = after()
            tensors = [torch_like(shape) for shape in split.outputs]
            values = [tensors[n] if isinstance(n, int) else n[0] for n in places]
            number += 1
        # `except-last` would keep the last micro-batch's activations, but the program treats all micro-batches alike.
        stages.append(JaxStage(layers, num_inputs, recompute=cut.recompute in ("always", "except-last")))
    return stages


def _layer_function_of(
    loaded: LoadedModel, layer: Layer, values: Sequence[Any], nest: TreeSpec, *, targets: Any, last: bool
) -> tuple[LayerFunction, Callable[[], tuple[TreeSpec, list[Any]]]]:
    """Return a layer as a function of JAX arrays, and a function that describes the layer's outputs.

    `values` are the flattened inputs, with the structure `nest`. With `last`, the layer's function also computes the
    loss from `targets`. Call the second function after the first was traced. It returns the structure of the outputs,
    and a list with one item per flattened output: the output's index among the tensors, or `(value,)` if the output is
    not a tensor.
    """
    of_loss, loss_nest = tree_flatten(targets)
    seen: dict[str, Any] = {}

    def run(values_in: Sequence[Any]) -> Sequence[Any]:
        output = layer.module(tree_unflatten(list(values_in[: len(values)]), nest))
        if last:
            output = loaded.loss_fn(output, tree_unflatten(list(values_in[len(values) :]), loss_nest))
        outputs, seen["nest"] = tree_flatten(output)
        tensors = iter(range(len(outputs)))
        seen["places"] = [next(tensors) if isinstance(value, Tensor) else (value,) for value in outputs]
        return outputs

    function = layer_function(layer.module, run, [*values, *of_loss])
    return function, lambda: (seen["nest"], seen["places"])


def _stage_names(layer: Layer, stage: int, owners: dict[int, tuple[int, str]]) -> dict[str, str]:
    names = {}
    for in_layer, (name, tensor) in zip(_tensors_in_layer(layer), _tensors_in_model(layer).items(), strict=True):
        if isinstance(tensor, torch.nn.Parameter):
            first_stage, first = owners.setdefault(id(tensor), (stage, name))
            if first_stage != stage:
                raise UsageError(
                    f'"{name}" is the same parameter as "{first}" in another stage, and the JAX program does not sum '
                    "their gradients",
                    hint="build the model without sharing it, or emit for the bundled executor, which sums gradients",
                )
            names[in_layer] = first
        else:
            names[in_layer] = name
    return names


def _tensors_in_model(layer: Layer) -> dict[str, Tensor]:
    prefix = "" if isinstance(layer.module, ModelStage) else f"{layer.name}."
    return {f"{prefix}{name}": tensor for name, tensor in _tensors_in_layer(layer).items()}


def _tensors_in_layer(layer: Layer) -> dict[str, Tensor]:
    return {**dict(layer.module.named_parameters()), **dict(layer.module.named_buffers())}


def _as_numpy(tensor: Tensor) -> Any:
    # numpy itself has no bfloat16.
    held = tensor.detach().cpu()
    return np.asarray(held.float() if held.dtype == torch.bfloat16 else held, jax_shape_of(tensor).dtype)
