"""The memory of every distinct unit, micro-batch size by micro-batch size, as far as memory suffices."""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from planner.core.errors import MeasurementError
from planner.core.values.profile import MemoryDetail, SplitMemory
from planner.device.kinds import kind_of
from planner.device.machine import give_freed_memory_back
from planner.device.meter import Meter
from planner.model.refusals import TooFewSamplesError, code_told
from planner.profile.halves import measure_halves
from planner.profile.memory import measure_memory
from planner.profile.task import Task
from planner.profile.units import Key, Unit, UnitInput, trace_units

_MEMORY_PASSES = 10
"""How many timed passes a memory record takes, about."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A distinct unit at one micro-batch size."""

    key: Key
    """A unit is known by its trace at the first size."""
    unit: Unit
    """The unit as it was traced at this size."""
    received: UnitInput


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What a backend does with units on the way to their records."""

    device: torch.device
    """Where tensors lie meanwhile."""
    record: Callable[[Sequence[Job]], None]
    """Puts the record of every job into `Task.kept`."""
    prepare: Callable[[Sequence[Unit]], None] = lambda _: None
    """Called with every layer's unit before the first is run."""
    received: Callable[[UnitInput], UnitInput] = lambda traced: traced
    """What to run a unit on, from its input as it was traced."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Every layer's unit, and what each distinct one takes at every size for which memory suffices."""

    units: tuple[Unit, ...]
    sizes: tuple[int, ...]
    inputs: Mapping[Key, UnitInput]
    memory: Mapping[Key, MemoryDetail]
    halves: Mapping[Key, SplitMemory]
    """The records of backwards in halves; empty where they were not recorded."""

    @cached_property
    def distinct(self) -> dict[str, Unit]:
        """The first unit of every digest."""
        return {unit.digest: unit for unit in reversed(self.units)}

    @property
    def names(self) -> dict[str, str]:
        """What to call the unit of every digest."""
        return {digest: unit.name for digest, unit in self.distinct.items()}

    def of_each(self, figure: Callable[[Unit, UnitInput], int]) -> dict[str, int]:
        """A figure of every distinct unit, by its digest: `figure` of the unit and its input at the smallest size."""
        return {digest: figure(unit, self.inputs[digest, self.sizes[0]]) for digest, unit in self.distinct.items()}

    def names_in(self, layer: int, names: Collection[str]) -> set[str]:
        """Return the names that parameters of a layer have there, from their `names` in the first of its digest."""
        unit = self.units[layer]
        first = self.distinct[unit.digest].module.named_parameters()
        pairs = zip(unit.module.named_parameters(), first, strict=True)
        return {own for (own, _), (name, _) in pairs if name in names}


def record_sizes(task: Task, ways: Ways) -> Records:
    """Traces the units at every size and records their memory.

    Raises:
        ModelError: A layer does not run on what the layer before it returned.
        MeasurementError: Memory does not suffice for a size that was asked for, or for any.
    """
    units: tuple[Unit, ...] = ()
    sizes: list[int] = []
    inputs: dict[Key, UnitInput] = {}
    for size in task.options.micro_batch_sizes:
        failed = False
        try:
            units, jobs = _traced_at(task, ways, units, size)
            ways.record(jobs)
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
            # Behind the handler, where the error no longer holds on to the tensors of the failed attempt.
            jobs = []
            _end_at(task, ways.device, sizes, size)
            break
        inputs |= {job.key: job.received for job in jobs}
        sizes.append(size)
    return Records(units=units, sizes=tuple(sizes), inputs=inputs, memory=task.kept.memory, halves=task.kept.halves)


def record_memory(jobs: Sequence[Job], task: Task, meter: Meter, *, in_halves: bool) -> None:
    """Runs each unit of which there is no record yet, by the meter; its backward in halves, too, if asked to."""
    kept = task.kept
    missing = {job.key: job for job in jobs if job.key not in kept.memory or (in_halves and job.key not in kept.halves)}
    names = {digest: job.unit.name for (digest, _), job in missing.items()}
    for key in task.steps.each(list(missing), names, passes=_MEMORY_PASSES):
        job = missing[key]
        with code_told(f'layer "{job.unit.name}"'):
            kept.memory[key] = measure_memory(job.unit, job.received, meter, task.buffer_bytes[job.unit.name])
            if in_halves:
                kept.halves[key] = measure_halves(job.unit, job.received, meter)
        # Layers of several sizes leave holes.
        give_freed_memory_back()


def _traced_at(task: Task, ways: Ways, first: tuple[Unit, ...], size: int) -> tuple[tuple[Unit, ...], list[Job]]:
    """Every layer's unit as it was traced at the first size, and a job of every distinct one at this size.

    The units of the `first` size are none if this is it.
    """
    units, traced = trace_units(task.chain, task.loaded, (size,), ways.device, ghosts=task.lean)
    if not first:
        for text in task.loaded.notes:  # they have run, so it is clear what the loss is
            task.note(text)
        first = units
        ways.prepare(units)
    jobs: dict[Key, Job] = {}
    for at_first, unit in zip(first, units, strict=True):
        key = (at_first.digest, size)
        if key not in jobs:
            jobs[key] = Job(key=key, unit=unit, received=ways.received(traced[unit.digest, size]))
    return first, list(jobs.values())


def _end_at(task: Task, device: torch.device, fitting: Sequence[int], size: int) -> None:
    """Frees what the failed attempt left; larger sizes are left out, or it is an error."""
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
    """Whether it, or what caused it, is a device or the machine that has no more."""
    while error is not None:
        # torch's allocator on the CPU has no error of its own.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
