"""Measure the costs of layers that run on a device of this machine."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from planner.core.values.profile import Device
from planner.device.clock import Clock
from planner.device.kinds import kind_of
from planner.device.machine import keep_freed_memory, release_freed_memory
from planner.device.meter import MemoryMeter
from planner.model.batch_norm import defer_batch_norms
from planner.model.lean import allocate_parameters
from planner.model.load import LoadedModel
from planner.profile.flops import forward_flops
from planner.profile.idle import parameters_with_gradients, parameters_without_gradients
from planner.profile.layers import BackendResult, MeasuredCosts, layer_profiles
from planner.profile.memory import measure_weight_casts
from planner.profile.optimizer import (
    OptimizerCost,
    first_of_same_cost,
    has_additive_peaks,
    measure_optimizer,
    optimizer_boundary_peaks,
)
from planner.profile.records import LayerRecords, MeasurementHooks, record_layers, record_memory
from planner.profile.rewriting import rewritten_bytes
from planner.profile.task import ProfilingTask
from planner.profile.timing import (
    LayerTimes,
    equal_layers,
    measure_times,
    measured_split_times,
    median_times,
    round_ratios,
    statistics_update_us,
    time_uncertainty,
)
from planner.profile.units import LayerKey, LayerToMeasure, with_random_values

_DOUBT = 0.02
"""Uncertainty at which repeats stop: relative half-width of the 95 % confidence interval of the time of all layers."""


class MeasuredBackend:
    """Backend that measures layers on a device of this machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kind = kind_of(device)

    def describe(self) -> Device:
        """Return the device, with the part of its memory that is not available for tensors."""
        return self._kind.describe()

    def check(self, loaded: LoadedModel, *, lean: bool) -> None:
        """Accept any model."""

    def measure(self, task: ProfilingTask) -> BackendResult:
        """Measure memory first, while nothing else is allocated, and then times."""
        meter, clock = self._kind.meter(), self._kind.clock(task.options.threads)
        hooks = MeasurementHooks(
            device=self.device,
            prepare=partial(_fill, task, self.device),
            received=partial(with_random_values, device=self.device),
            record=partial(record_memory, task=task, meter=meter),
        )
        records = record_layers(task, hooks)
        release_freed_memory()
        if not self._kind.has_own_memory:
            keep_freed_memory()
        casts_bytes = records.measure_distinct(partial(measure_weight_casts, meter=meter))
        rewritten = records.measure_distinct(rewritten_bytes)
        idle = parameters_without_gradients(task, records)
        before = _optimizer_costs(task, records, idle, meter=meter, clock=clock)
        release_freed_memory()
        times = _times(task, records, clock)
        release_freed_memory()
        # The updates are timed a second time, because the machine may have been busy during the first few.
        after = _optimizer_costs(task, records, idle, meter=meter, clock=clock)
        updating_us = records.measure_distinct(partial(statistics_update_us, clock=clock, repeats=task.options.repeats))
        optimizer = [
            replace(cost, step_us=min(cost.step_us, earlier.step_us) + updating_us[unit.digest])
            for unit, earlier, cost in zip(records.units, before, after, strict=True)
        ]
        costs = MeasuredCosts(
            records=records,
            casts_bytes=casts_bytes,
            rewritten_bytes=rewritten,
            idle=idle,
            optimizer=optimizer,
            optimizer_boundary_peaks=optimizer_boundary_peaks(
                parameters_with_gradients(records, idle), task.whole_optimizer(), device=self.device, meter=meter
            ),
            flops=records.measure_distinct(forward_flops),
            times=times,
            half_times_us={
                key: measured_split_times(task.measurements.split_samples[key], times[key]) for key in records.inputs
            },
        )
        largest = max(records.distinct.values(), key=lambda unit: unit.parameter_bytes)
        return BackendResult(
            sizes=records.sizes,
            optimizer_peaks_add=has_additive_peaks(largest.module, task.whole_optimizer(), meter=meter),
            layers=layer_profiles(task, costs),
            round_ratios=round_ratios([task.measurements.samples[key] for key in records.inputs]),
        )


def _fill(task: ProfilingTask, device: torch.device, units: Sequence[LayerToMeasure]) -> None:
    digests = dict.fromkeys(unit.digest for unit in reversed(units))
    running = [units[n].module for digest in digests for n in equal_layers(units, digest)]
    allocate_parameters(running, task.chain.model, device)


def _optimizer_costs(
    task: ProfilingTask, records: LayerRecords, idle: Mapping[str, Collection[str]], *, meter: MemoryMeter, clock: Clock
) -> list[OptimizerCost]:
    # A training step accesses parameters and gradients of all layers between two updates of one layer.
    bytes_between_updates = 2 * sum(p.nbytes for layer in task.chain.layers for p in layer.module.parameters())
    units, whole = records.units, task.whole_optimizer()
    first = first_of_same_cost(units, whole)
    distinct = list(dict.fromkeys(first))
    keys = [(units[n].digest, records.sizes[0]) for n in distinct]
    costs = {
        n: measure_optimizer(
            records.distinct[digest].module,
            whole,
            layer_of_model=units[n].module,
            meter=meter,
            clock=clock,
            repeats=task.options.repeats,
            bytes_between_updates=bytes_between_updates,
            idle=idle[digest],
        )
        for n, (digest, _) in zip(distinct, task.steps.each(keys, records.names), strict=True)
    }
    return [costs[n] for n in first]


def _times(task: ProfilingTask, records: LayerRecords, clock: Clock) -> dict[LayerKey, LayerTimes]:
    started, budget_s = time.monotonic(), task.options.time_budget_s

    def needs_repeats() -> bool:
        if not budget_s:
            return False
        share = _doubt(task, records)
        if share >= _DOUBT and time.monotonic() - started > budget_s:
            task.warn(
                f"this machine is too noisy to determine the best plan: the time of all layers is known "
                f"to ±{share:.1%} only; end other programs, or allow more than `--time-budget {budget_s:g}s`"
            )
            return False
        return share >= _DOUBT

    with defer_batch_norms(task.chain.model) as statistics:
        progress = partial(task.steps.each, names=records.names)
        measure_times(task, records, statistics=statistics, clock=clock, needs_repeats=needs_repeats, progress=progress)
    return {key: median_times(task.measurements.samples[key]) for key in records.inputs}


def _doubt(task: ProfilingTask, records: LayerRecords) -> float:
    samples = {key: task.measurements.samples[key] for key in records.inputs}
    return time_uncertainty([unit.digest for unit in records.units], samples)
