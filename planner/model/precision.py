"""Prepare a model for the requested precision: convert it, or run it under autocast."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.core.values.precision import Precision
from planner.core.values.profile import Model
from planner.model.copying import copy_module
from planner.model.load import Batch, LoadedModel, load_model

_CONVERTED: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def in_precision(loaded: LoadedModel, precision: Precision) -> LoadedModel:
    """Return `loaded` with batches and a loss function for `precision`, without converting the model.

    If the precision converts parameters, floating-point inputs are converted, too. The loss is always computed in
    float32. The model itself is converted after it is built (`convert_in_place`).
    """
    if not precision:
        return loaded

    converts = precision in _CONVERTED

    def example_batch(size: int) -> Batch:
        inputs, targets = loaded.example_batch(size)
        return Batch(to_precision(inputs, precision), targets)

    def train_batches(size: int) -> Iterator[Any]:
        assert loaded.train_batches is not None
        for inputs, targets in loaded.train_batches(size):
            yield to_precision(inputs, precision), targets

    def loss_fn(output: Any, target: Any) -> Tensor:
        return loaded.loss_fn(to_precision(output, "fp32") if converts else output, target).float()

    return replace(
        loaded,
        precision=precision,
        example_batch=example_batch,
        loss_fn=loss_fn,
        train_batches=train_batches if converts and loaded.train_batches is not None else loaded.train_batches,
    )


def reload_model(source: str, model: Model, precision: Precision, *, optimizer: str | None = None) -> LoadedModel:
    """Return a model as it was profiled: with the same settings, inputs and cuts.

    Args:
        source: Path of the model's file, and its entry after a colon.
        model: Description of the model in its profile.
        precision: Precision in which the model runs.
        optimizer: Name of an optimizer. None, "" and "build_optimizer" all mean the optimizer of the model's file.

    Raises:
        FileError: The file does not exist.
        ModelError: The model cannot be loaded.
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
    """Return a nested value with its floating-point tensors converted to `precision`."""
    dtype = _CONVERTED.get(precision)
    if dtype is None:
        return value
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def convert_in_place(module: nn.Module, precision: Precision) -> nn.Module:
    """Convert floating-point parameters and buffers in place; tied tensors stay tied."""
    dtype = _CONVERTED.get(precision)
    if dtype is None:
        return module
    # `module.to` would drop the imaginary part of complex buffers.
    module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    return module


def convert_if_needed(module: nn.Module, precision: Precision) -> nn.Module:
    """Return a copy of `module` in `precision`, or `module` itself if nothing needs conversion."""
    dtype = _CONVERTED.get(precision)
    tensors = (*module.parameters(), *module.buffers())
    if dtype is None or not any(t.is_floating_point() and t.dtype != dtype for t in tensors):
        return module
    return convert_in_place(copy_module(module), precision)


def parameter_dtype_name(module: nn.Module) -> str:
    """Return the dtype of a module's first parameter, such as `float32`."""
    return str(next((p.dtype for p in module.parameters()), torch.float32)).removeprefix("torch.")
