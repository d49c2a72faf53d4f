"""Trace the layers to measure: each with its input, and the last one together with the loss.

The loss runs inside the last stage, so its time and memory belong to the last layer. The digest of a layer covers its
operators with their arguments (shape and dtype of a tensor, value of any other argument), its parameters and its saved
tensors. Of layers with equal digests, only the first is measured.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.core.errors import ModelError
from planner.core.values.precision import Precision
from planner.model.autocast import forward_context, weight_cast_cache
from planner.model.calling import copy_containers
from planner.model.chain import Chain, Layer
from planner.model.ghosts import Ghost
from planner.model.load import Batch, LoadedModel, to_device
from planner.model.module_tensors import parameters_as_ghosts
from planner.model.operators import OperatorWatch
from planner.model.refusals import INPUT_HINT, STAGE_HINT, check_scalar_loss, explain_error
from planner.model.regions import without_reentrant_checkpointing
from planner.model.stage import ModelStage
from planner.model.user_errors import explain_user_errors
from planner.model.variables import undo_variable_changes

LayerKey = tuple[str, int]
"""Digest of a layer's operators, and a micro-batch size."""

TimeSamples = dict[LayerKey, list[tuple[float, float]]]
"""For every layer and micro-batch size, pairs of times in microseconds.

A pair is (forward, backward). If the backward is split into the passes I (input gradients) and W (weight gradients), a
pair is (forward plus I, W)."""


@dataclass(frozen=True)
class MeasurementInput:
    """Input of a layer for one micro-batch. Its tensors are leaves; they require gradients as in the model."""

    values: tuple[Any, ...]
    spec: TreeSpec
    targets: Any

    def new_leaf_copies(self) -> list[Any]:
        """Return copies of the input's values. Their tensors are new leaves of the autograd graph."""
        return [
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in self.values
        ]

    def non_leaf_copies(self) -> list[Any]:
        """Return copies of the input's values. Their tensors are no leaves, so that a layer may write into them."""
        return [value.clone() if isinstance(value, Tensor) else value for value in self.new_leaf_copies()]


@dataclass(frozen=True)
class LayerToMeasure:
    """Layer to measure; the last layer includes the loss."""

    name: str
    module: nn.Module
    loss_fn: Callable[[Any, Any], Tensor] | None
    digest: str
    precision: Precision = ""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    repeats: int = 1
    """Number of consecutive equal layers in `module`."""

    @property
    def parameter_bytes(self) -> int:
        """Memory of the parameters in bytes; of one layer if `module` has several."""
        return sum(parameter.nbytes for parameter in self.module.parameters()) // self.repeats

    def run(self, values: Sequence[Any], received: MeasurementInput) -> list[Any]:
        """Run the layer's forward on a flat list of inputs, and return a flat list of outputs.

        `received` tells how `values` are nested in the layer's input. For the last layer, it also has the targets that
        the loss needs.
        """
        with forward_context(self.precision, self.device), without_reentrant_checkpointing():
            output = self.module(tree_unflatten(list(values), received.spec))
            if self.loss_fn is not None:
                output = self.loss_fn(output, copy_containers(received.targets))
        return tree_flatten(output)[0]

    def weight_cast_cache(self) -> AbstractContextManager[Any]:
        """Return a context manager in which runs share autocast's weight cache."""
        return weight_cast_cache(self.precision, self.device)


def trace_layers(
    chain: Chain, loaded: LoadedModel, size: int, device: torch.device, *, ghosts: bool = False
) -> tuple[tuple[LayerToMeasure, ...], dict[str, MeasurementInput]]:
    """Return every layer with a digest of its operators, and the input of the first layer with each digest.

    Args:
        chain: The layers. Their parameters must have values, except with `ghosts`.
        loaded: The model.
        size: Micro-batch size.
        device: Device of the inputs.
        ghosts: True if parameters, and tensors between layers, are ghosts without values. A layer that reads their
            values then raises an error, usually `NeedsValuesError`.

    Raises:
        ModelError: A layer fails on the output of the previous layer.
    """
    inputs: dict[str, MeasurementInput] = {}
    units: list[LayerToMeasure] = []
    with ExitStack() as stack:
        if ghosts:
            # Attributes are restored afterwards: no ghost may stay in one, and numbers in them affect the digest.
            stack.enter_context(undo_variable_changes(chain.model, loaded.loss_fn))
            stack.enter_context(parameters_as_ghosts(chain.model))
        stack.enter_context(without_reentrant_checkpointing())
        batch = loaded.example_batch(size)
        if not ghosts:
            batch = Batch(to_device(batch.inputs, device), to_device(batch.targets, device))
        value = _detached(batch.inputs)
        for layer in chain.layers:
            is_last = layer is chain.layers[-1]
            received = _received(value, batch.targets if is_last else None)
            check = partial(_check_loss, loaded, chain, batch.targets) if is_last else None
            context = forward_context(loaded.precision, device)
            value, trace = _traced(layer, value, size, context=context, check=check)
            digest = _digest([loaded.precision, *trace], received, last=is_last)
            loss_fn = loaded.loss_fn if is_last else None
            units.append(LayerToMeasure(layer.name, layer.module, loss_fn, digest, loaded.precision, device))
            inputs.setdefault(digest, received)
            value = None if is_last else _detached(value)
    return tuple(units), inputs


def layer_digests(chain: Chain, loaded: LoadedModel) -> tuple[str, ...]:
    """Return a digest of each layer's operators, recorded without tensor values; empty if a layer needs values."""
    for size in (1, 2):  # some layers, such as batch normalization, need two samples
        with suppress(Exception):
            units, _ = trace_layers(chain, loaded, size, torch.device("cpu"), ghosts=True)
            return tuple(unit.digest for unit in units)
    return ()


def with_random_values(received: MeasurementInput, device: torch.device) -> MeasurementInput:
    """Return an input with random numbers in place of ghosts (tensors without values)."""
    values = [_stand_in(value, device) if isinstance(value, Ghost) else value for value in received.values]
    return MeasurementInput(tuple(to_device(values, device)), received.spec, to_device(received.targets, device))


def _stand_in(ghost: Ghost, device: torch.device) -> Tensor:
    tensor = torch.empty_strided(ghost.size(), ghost.stride(), dtype=ghost.dtype, device=device)
    if not tensor.is_floating_point():
        return tensor.zero_()
    return tensor.normal_().requires_grad_(ghost.requires_grad)


def _traced(
    layer: Layer,
    value: Any,
    size: int,
    *,
    context: AbstractContextManager[Any],
    check: Callable[[Any], object] | None,
) -> tuple[Any, list[list[Any] | str]]:
    trace: list[list[Any] | str] = []
    # Parameters are part of the trace, because two layers with equal operators may have different unused parameters.
    held = [_shape(parameter) for parameter in layer.module.parameters()]

    def ran(func: Any, args: Any, kwargs: Any) -> None:
        trace.append([str(func), [_shape(leaf) for leaf in tree_flatten((args, kwargs))[0]]])

    def saved(tensor: Tensor) -> Tensor:
        # Saved tensors are part of the trace, because a layer that recomputes (checkpoints) saves fewer.
        trace.append(["saved", _shape(tensor)])
        return tensor

    if isinstance(layer.module, ModelStage):
        # Code that runs before the stage's first layer is not part of the trace.
        layer.module.call_at_stage_ends(begun=trace.clear)
        held += [_shape(tensor) for tensor in layer.module.tensors_of_repeated_code]
    with OperatorWatch(before=ran), saved_tensors_hooks(saved, lambda tensor: tensor), context:
        output = _call(layer, value, size)
        if check is not None:
            check(output)
    return output, [*held, *trace]


def _call(layer: Layer, value: Any, size: int) -> Any:
    try:
        return layer.module(value)
    except (Exception, SystemExit) as error:
        shapes = ", ".join(_shape(leaf) for leaf in tree_flatten(value)[0])
        where = f'layer "{layer.name}" ({type(layer.module).__name__})'
        hint = STAGE_HINT if isinstance(layer.module, ModelStage) else INPUT_HINT
        raised = explain_error(where, error, f"{shapes}, micro-batch size {size}", hint=hint)
        if raised is error:
            raise
        raise raised from error


def _check_loss(loaded: LoadedModel, chain: Chain, targets: Any, output: Any) -> None:
    with explain_user_errors(loaded.source.rpartition(":")[0], "`loss_fn(output, target)`"):
        loss: Any = loaded.loss_fn(output, copy_containers(targets))
    check_scalar_loss(loss)
    trainable = any(p.requires_grad for layer in chain.layers for p in layer.module.parameters())
    if trainable and not loss.requires_grad:
        hint = "look for `detach()`, `.item()` or `no_grad` between the parameters and the loss"
        raise ModelError("the loss carries no gradient, so nothing would be trained", hint=hint)


def _received(value: Any, targets: Any) -> MeasurementInput:
    leaves, spec = tree_flatten(value)
    received = MeasurementInput(tuple(leaves), spec, targets)
    return replace(received, values=tuple(received.new_leaf_copies()))


def _detached(value: Any) -> Any:
    # The clone of a new leaf can be overwritten by a layer: autograd forbids writes into a leaf itself.
    leaves, spec = tree_flatten(value)
    copies = [t.detach().requires_grad_(t.requires_grad).clone() if isinstance(t, Tensor) else t for t in leaves]
    return tree_unflatten(copies, spec)


def _digest(trace: list[Any], received: MeasurementInput, *, last: bool) -> str:
    leaves = [[_shape(leaf), getattr(leaf, "requires_grad", None)] for leaf in received.values]
    text = json.dumps([trace, leaves, str(received.spec), last])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{'g' if value.requires_grad else ''}"
    return repr(value)
