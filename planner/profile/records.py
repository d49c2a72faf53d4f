"""Record the memory of every distinct unit, size by size, as far as memory suffices."""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from planner.core.errors import MeasurementError
from planner.core.values.profile import MemoryDetail, SplitMemory
from planner.device.kinds import kind_of
from planner.device.machine import release_freed_memory
from planner.device.meter import Meter
from planner.model.refusals import TooFewSamplesError, explained_refusals
from planner.profile.memory import measure_memory
from planner.profile.split_memory import measure_split_memory
from planner.profile.task import Task
from planner.profile.units import Key, Unit, UnitInput, trace_units

_MEMORY_PASSES = 10
"""Approximate duration of a memory record, as a multiple of a timed pass."""


@dataclass(frozen=True, kw_only=True)
class SizedUnit:
    """Distinct unit at one micro-batch size."""

    key: Key
    """Key of the unit, with the digest of its trace at the first size."""
    unit: Unit
    """Unit as it was traced at this size."""
    received: UnitInput


@dataclass(frozen=True, kw_only=True)
class RecordingHooks:
    """Functions that a backend provides for recording units."""

    device: torch.device
    """Device of the tensors."""
    record: Callable[[Sequence[SizedUnit]], None]
    """Stores the record of every unit in `Task.measurements`."""
    prepare: Callable[[Sequence[Unit]], None] = lambda _: None
    """Called with every layer's unit before the first is run."""
    received: Callable[[UnitInput], UnitInput] = lambda traced: traced
    """Converts the traced input of a unit to the one that it runs on."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Unit of every layer, and the records of each distinct one at every size that fits in memory."""

    units: tuple[Unit, ...]
    sizes: tuple[int, ...]
    inputs: Mapping[Key, UnitInput]
    memory: Mapping[Key, MemoryDetail]
    halves: Mapping[Key, SplitMemory]
    """Records of split backwards; empty if they were not recorded."""

    @cached_property
    def distinct(self) -> dict[str, Unit]:
        """First unit of every digest."""
        return {unit.digest: unit for unit in reversed(self.units)}

    @property
    def names(self) -> dict[str, str]:
        """Name of the unit of every digest."""
        return {digest: unit.name for digest, unit in self.distinct.items()}

    def of_each(self, figure: Callable[[Unit, UnitInput], int]) -> dict[str, int]:
        """Return `figure(unit, input)` for every distinct unit at the smallest size, by digest."""
        return {digest: figure(unit, self.inputs[digest, self.sizes[0]]) for digest, unit in self.distinct.items()}

    def names_in(self, layer: int, names: Collection[str]) -> set[str]:
        """Return the parameters of `layer` that correspond to `names` in the first layer with the same digest."""
        unit = self.units[layer]
        first = self.distinct[unit.digest].module.named_parameters()
        pairs = zip(unit.module.named_parameters(), first, strict=True)
        return {own for (own, _), (name, _) in pairs if name in names}


def record_sizes(task: Task, hooks: RecordingHooks) -> Records:
    """Trace the units at every size and record their memory.

    Raises:
        ModelError: A layer does not run on the output of the previous layer.
        MeasurementError: A requested size, or every size, exceeds memory.
    """
    units: tuple[Unit, ...] = ()
    sizes: list[int] = []
    inputs: dict[Key, UnitInput] = {}
    for size in task.options.micro_batch_sizes:
        failed = False
        try:
            units, sized_units = _traced_at(task, hooks, units, size)
            hooks.record(sized_units)
        except TooFewSamplesError as error:
            if not task.options.until_memory_ends or size == task.options.micro_batch_sizes[-1]:
                raise
            task.warn(f"micro-batch size {size} is left out: {error.message}")
            continue
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            failed = True
        if failed:
            # Outside of the handler, where the error no longer refers to the tensors of the failed attempt.
            sized_units = []
            _end_at(task, hooks.device, sizes, size)
            break
        inputs |= {sized.key: sized.received for sized in sized_units}
        sizes.append(size)
    measurements = task.measurements
    return Records(
        units=units,
        sizes=tuple(sizes),
        inputs=inputs,
        memory=measurements.memory,
        halves=measurements.halves,
    )


def record_memory(sized_units: Sequence[SizedUnit], task: Task, meter: Meter, *, in_halves: bool) -> None:
    """Run and measure each unit without a record.

    Args:
        sized_units: Units at one size.
        task: The task, which gets the records.
        meter: Meter of the device.
        in_halves: Whether to record split backwards as well.
    """
    measurements = task.measurements
    done = measurements.memory.keys() & measurements.halves.keys() if in_halves else measurements.memory.keys()
    missing = {sized.key: sized for sized in sized_units if sized.key not in done}
    names = {digest: sized.unit.name for (digest, _), sized in missing.items()}
    for key in task.steps.each(list(missing), names, passes=_MEMORY_PASSES):
        sized = missing[key]
        with explained_refusals(f'layer "{sized.unit.name}"'):
            measurements.memory[key] = measure_memory(
                sized.unit, sized.received, meter, task.buffer_bytes[sized.unit.name]
            )
            if in_halves:
                measurements.halves[key] = measure_split_memory(sized.unit, sized.received, meter)
        # Layers of several sizes leave holes.
        release_freed_memory()


def _traced_at(
    task: Task, hooks: RecordingHooks, first: tuple[Unit, ...], size: int
) -> tuple[tuple[Unit, ...], list[SizedUnit]]:
    """Return every layer's unit as it was traced at the first size, and every distinct one at this size.

    `first` has the units of the first size; it is empty if this is the first.
    """
    units, traced = trace_units(task.chain, task.loaded, (size,), hooks.device, ghosts=task.lean)
    if not first:
        for text in task.loaded.notes:  # they have run, so it is clear what the loss is
            task.note(text)
        first = units
        hooks.prepare(units)
    sized_units: dict[Key, SizedUnit] = {}
    for at_first, unit in zip(first, units, strict=True):
        key = (at_first.digest, size)
        if key not in sized_units:
            sized_units[key] = SizedUnit(key=key, unit=unit, received=hooks.received(traced[unit.digest, size]))
    return first, list(sized_units.values())


def _end_at(task: Task, device: torch.device, fitting: Sequence[int], size: int) -> None:
    """Free memory of the failed attempt; leave out larger sizes, or raise an error."""
    gc.collect()
    kind_of(device).empty_cache()
    if not fitting:
        raise MeasurementError(
            f"out of memory at micro-batch size {size}, the smallest",
            hint="profile on a device with more memory, or a smaller model",
        )
    if not task.options.until_memory_ends:
        sizes = ",".join(map(str, fitting))
        raise MeasurementError(f"out of memory at micro-batch size {size}", hint=f"use `--batch-sizes {sizes}`")
    task.warn(f"out of memory at micro-batch size {size}: sizes up to {fitting[-1]} are measured")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or its cause, is that a device or the machine has no more memory."""
    while error is not None:
        # torch's allocator on the CPU has no error of its own.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
