"""Measure the memory of layers at every micro-batch size that fits on the device."""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from planner.core.errors import MeasurementError
from planner.device.kinds import kind_of
from planner.device.machine import release_freed_memory
from planner.device.meter import MemoryMeter, is_out_of_memory
from planner.model.refusals import TooFewSamplesError, explain_refusals
from planner.profile.memory import measure_memory
from planner.profile.split_memory import measure_split_memory
from planner.profile.task import ProfilingTask
from planner.profile.units import LayerKey, LayerToMeasure, MeasurementInput, trace_layers

_Figure = TypeVar("_Figure", int, float)

_MEMORY_PASSES = 10
"""Number of timed passes that take about as long as one memory measurement."""


@dataclass(frozen=True, kw_only=True)
class LayerAtSize:
    """Layer to measure, with one micro-batch size."""

    key: LayerKey
    """Digest of the layer, and the micro-batch size to measure."""
    unit: LayerToMeasure
    """Layer as traced at the micro-batch size to measure."""
    received: MeasurementInput


@dataclass(frozen=True, kw_only=True)
class MeasurementHooks:
    """Functions of a profile backend that measure the memory of layers."""

    device: torch.device
    """Device on which layers run."""
    record: Callable[[Sequence[LayerAtSize]], None]
    """Function that measures layers and stores the results in `ProfilingTask.measurements`."""
    prepare: Callable[[Sequence[LayerToMeasure]], None] = lambda _: None
    """Function that is called with all layers before the first one runs."""
    received: Callable[[MeasurementInput], MeasurementInput] = lambda traced: traced
    """Function that converts a layer's traced input to the input on which the layer runs."""


@dataclass(frozen=True, kw_only=True)
class LayerRecords:
    """Traced layers, and the micro-batch sizes that fit on the device."""

    units: tuple[LayerToMeasure, ...]
    sizes: tuple[int, ...]
    inputs: Mapping[LayerKey, MeasurementInput]

    @cached_property
    def distinct(self) -> dict[str, LayerToMeasure]:
        """Layers to measure, by digest of their operators. Of layers with equal digests, only the first is measured."""
        return {unit.digest: unit for unit in reversed(self.units)}

    @property
    def names(self) -> dict[str, str]:
        """Names of the layers to measure, by digest of their operators."""
        return {digest: unit.name for digest, unit in self.distinct.items()}

    def measure_distinct(self, figure: Callable[[LayerToMeasure, MeasurementInput], _Figure]) -> dict[str, _Figure]:
        """Return `figure(unit, input)` at the smallest micro-batch size for every measured layer, by its digest."""
        return {digest: figure(unit, self.inputs[digest, self.sizes[0]]) for digest, unit in self.distinct.items()}

    def translate_parameter_names(self, layer: int, names: Collection[str]) -> set[str]:
        """Translate names of a measured layer's parameters to those of layer `layer`, which has the same digest."""
        unit = self.units[layer]
        first = self.distinct[unit.digest].module.named_parameters()
        pairs = zip(unit.module.named_parameters(), first, strict=True)
        return {own for (own, _), (name, _) in pairs if name in names}


def record_layers(task: ProfilingTask, hooks: MeasurementHooks) -> LayerRecords:
    """Trace the layers at every micro-batch size, measure their memory, and return the records.

    Raises:
        ModelError: A layer fails on the output of the previous layer.
        MeasurementError: No micro-batch size fits in memory; or the user requested a size that does not fit.
    """
    units: tuple[LayerToMeasure, ...] = ()
    sizes: list[int] = []
    inputs: dict[LayerKey, MeasurementInput] = {}
    for size in task.options.micro_batch_sizes:
        failed = False
        try:
            units, sized_units = _traced_at(task, hooks, units, size)
            hooks.record(sized_units)
        except TooFewSamplesError as error:
            if not task.options.skip_failing_sizes or size == task.options.micro_batch_sizes[-1]:
                raise
            task.warn(f"micro-batch size {size} is left out: {error.message}")
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        if failed:
            # Outside of the handler, the error no longer keeps the tensors of the failed attempt in memory.
            sized_units = []
            _end_at(task, hooks.device, sizes, size)
            break
        inputs |= {sized.key: sized.received for sized in sized_units}
        sizes.append(size)
    return LayerRecords(units=units, sizes=tuple(sizes), inputs=inputs)


def record_memory(sized_units: Sequence[LayerAtSize], task: ProfilingTask, meter: MemoryMeter) -> None:
    """Measure the memory of each layer that has no measurement yet.

    Args:
        sized_units: Layers with different digests, at one micro-batch size.
        task: Profiling task, whose `measurements` receive the results.
        meter: Meter of the device.
    """
    measurements = task.measurements
    done = measurements.memory.keys() & measurements.split_memory.keys()
    missing = {sized.key: sized for sized in sized_units if sized.key not in done}
    names = {digest: sized.unit.name for (digest, _), sized in missing.items()}
    for key in task.steps.each(list(missing), names, passes=_MEMORY_PASSES):
        sized = missing[key]
        with explain_refusals(f'layer "{sized.unit.name}"'):
            measurements.memory[key] = measure_memory(
                sized.unit, sized.received, meter, task.buffer_bytes[sized.unit.name]
            )
            measurements.split_memory[key] = measure_split_memory(sized.unit, sized.received, meter)
        # Layers of different sizes leave holes in the allocator's memory.
        release_freed_memory()


def _traced_at(
    task: ProfilingTask, hooks: MeasurementHooks, first: tuple[LayerToMeasure, ...], size: int
) -> tuple[tuple[LayerToMeasure, ...], list[LayerAtSize]]:
    units, traced = trace_layers(task.chain, task.loaded, size, hooks.device, ghosts=task.lean)
    if not first:
        for text in task.loaded.notes:  # the layers have run, so the default loss is known
            task.note(text)
        first = units
        hooks.prepare(units)
    sized_units: dict[LayerKey, LayerAtSize] = {}
    for at_first, unit in zip(first, units, strict=True):
        key = (at_first.digest, size)
        if key not in sized_units:
            sized_units[key] = LayerAtSize(key=key, unit=unit, received=hooks.received(traced[unit.digest]))
    return first, list(sized_units.values())


def _end_at(task: ProfilingTask, device: torch.device, fitting: Sequence[int], size: int) -> None:
    gc.collect()
    kind_of(device).empty_cache()
    if not fitting:
        raise MeasurementError(
            f"out of memory at micro-batch size {size}, the smallest",
            hint="profile on a device with more memory, or a smaller model",
        )
    if not task.options.skip_failing_sizes:
        sizes = ",".join(map(str, fitting))
        raise MeasurementError(f"out of memory at micro-batch size {size}", hint=f"use `--batch-sizes {sizes}`")
    task.warn(f"out of memory at micro-batch size {size}: sizes up to {fitting[-1]} are measured")
