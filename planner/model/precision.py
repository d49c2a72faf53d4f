"""A model in the precision that was asked for: converted, or made to run under autocast; also loaded again so."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.core.values.precision import Precision
from planner.core.values.profile import Model
from planner.model.load import Batch, LoadedModel, load_model

_CONVERTED: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def in_precision(loaded: LoadedModel, precision: Precision) -> LoadedModel:
    """`loaded` with batches and a loss that fit a model that runs in `precision`.

    Floating-point inputs are converted where parameters are. The loss is float32 in any precision; where outputs
    are of a converted model, it is computed from them in float32, as its gradient would be coarse otherwise.
    """
    if not precision:
        return loaded

    def example_batch(size: int) -> Batch:
        inputs, targets = loaded.example_batch(size)
        return Batch(to_precision(inputs, precision), targets)

    def loss_fn(output: Any, target: Any) -> Tensor:
        if precision in _CONVERTED:
            output = tree_map_only(Tensor, _as_float32, output)
        return loaded.loss_fn(output, target).float()

    return replace(
        loaded,
        precision=precision,
        example_batch=example_batch,
        loss_fn=loss_fn,
        train_batches=_converted_batches(loaded.train_batches, precision),
    )


def load_again(source: str, model: Model, precision: Precision, *, optimizer: str | None = None) -> LoadedModel:
    """The model in `source`, loaded with the settings, inputs and cuts that it was profiled with.

    The optimizer is the file's own unless it has another name than `build_optimizer`.

    Raises:
        FileError: The file is not there.
        ModelError: It cannot be loaded.
    """
    loaded = load_model(
        source,
        settings={name: str(value) for name, value in model.settings.items()},
        inputs=model.inputs,
        optimizer=None if optimizer in ("", "build_optimizer") else optimizer,
        granularity=model.granularity,
        uncut=model.uncut,
    )
    return in_precision(replace(loaded, counted_labels=model.counted_labels), precision)


def to_precision(value: Any, precision: Precision) -> Any:
    """Floating-point tensors in a nest, in the dtype of a converted model; others as they are."""
    dtype = _CONVERTED.get(precision)
    if dtype is None:
        return value
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def convert(module: nn.Module, precision: Precision) -> nn.Module:
    """Converts floating-point parameters and buffers, in place; tied ones stay tied."""
    dtype = _CONVERTED.get(precision)
    if dtype is None:
        return module
    # Not `module.to`, which would take the imaginary part off complex buffers.
    module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    return module


def converted(module: nn.Module, precision: Precision) -> nn.Module:
    """`module`, converted in a copy where anything changes: what a file built may be the user's own, finished model."""
    dtype = _CONVERTED.get(precision)
    tensors = (*module.parameters(), *module.buffers())
    if dtype is None or not any(t.is_floating_point() and t.dtype != dtype for t in tensors):
        return module
    return convert(copy.deepcopy(module), precision)


def dtype_of(module: nn.Module) -> str:
    """What most of a module's parameters are, `float32` say; only one is asked."""
    return str(next((p.dtype for p in module.parameters()), torch.float32)).removeprefix("torch.")


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _converted_batches(
    train_batches: Callable[[int], Iterable[Any]] | None, precision: Precision
) -> Callable[[int], Iterable[Any]] | None:
    if train_batches is None or precision not in _CONVERTED:
        return train_batches

    def converted(size: int) -> Iterator[Any]:
        for inputs, targets in train_batches(size):
            yield to_precision(inputs, precision), targets

    return converted
