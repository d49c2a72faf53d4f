"""Small models to load and to measure, without files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.core.values.profile import MemoryDetail, Profile, Setting
from planner.device.meter import CpuMemoryMeter
from planner.model.load import Batch, LoadedModel
from planner.profile.memory import measure_memory
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from planner.profile.units import LayerToMeasure, MeasurementInput


def mean_loss(output: Any, _target: Any) -> Tensor:
    """Return the model's own loss, or a scalar from any output."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([tensor.mean() for tensor in tensors]).mean()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer without state."""
    return torch.optim.SGD(parameters, lr=0.1)


def loaded_model(
    build: nn.Module | Callable[[], nn.Module],
    features: int | Callable[[int], Any] = 8,
    *,
    loss_fn: Callable[[Any, Any], Tensor] = mean_loss,
    build_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
    settings: Mapping[str, Setting] | None = None,
) -> LoadedModel:
    """Return a model as if loaded from a model.py.

    Args:
        build: A model, or a function that builds one.
        features: Numbers per sample, or a function from the batch size to the inputs.
        loss_fn: The loss; the targets are None.
        build_optimizer: The optimizer.
        settings: Settings as from `--set`.
    """

    def example(size: int) -> Batch:
        return Batch(torch.randn(size, features) if isinstance(features, int) else features(size), None)

    return LoadedModel(
        source="model.py:build_model",
        settings=dict(settings or {}),
        inputs=(),
        build=(lambda: build) if isinstance(build, nn.Module) else build,
        example_batch=example,
        loss_fn=loss_fn,
        build_optimizer=build_optimizer,
        train_batches=None,
        optimizer_name="sgd",
    )


def profile_of_model(loaded: LoadedModel, *, sizes: Sequence[int] = (2,), repeats: int = 2) -> Profile:
    """Return the model's profile on one CPU thread."""
    return profile_model(loaded, ProfilerOptions(micro_batch_sizes=tuple(sizes), repeats=repeats, time_budget_s=0.0))


def memory_of(module: nn.Module, value: Any) -> MemoryDetail:
    """Return the memory record of `module` for the input `value`."""
    leaves, spec = tree_flatten(value)
    unit = LayerToMeasure(name="layer", module=module, loss_fn=None, digest="")
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    return measure_memory(unit, MeasurementInput(tuple(leaves), spec, None), CpuMemoryMeter(), buffer_bytes)
