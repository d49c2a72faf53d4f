"""Time one pass of neighboring layers: all their forwards, then all their backwards.

This order gives caches and free memory nearly the same state as within a stage. Timing each layer separately adds
overhead, mainly the start of autograd's engine. The overhead is measured on a layer that does nothing, and subtracted.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.device.clock import Clock
from planner.device.machine import CACHE_BYTES
from planner.model.batch_norm import BatchStatistics
from planner.model.split_backward import DeferredUses, SplitBackward
from planner.model.stage import ModelStage
from planner.profile.crossing import LayerOutputs, make_layer_inputs, own_storages_of, tensors_fit_in_cache
from planner.profile.units import LayerToMeasure, MeasurementInput

NoteEntry = Callable[[LayerToMeasure, MeasurementInput, float], None]
"""Function that takes a layer, its input, and the layer's entry time in microseconds (`LayerProfile.entry_us`)."""


@dataclass(frozen=True, kw_only=True)
class UnsplitBackwardTimer:
    """Timer of a layer's forward and unsplit backward. The backward adds to gradients of earlier micro-batches."""

    clock: Clock
    statistics: BatchStatistics
    note_entry: NoteEntry | None = None

    def forward_us(
        self, unit: LayerToMeasure, values: Sequence[Any], received: MeasurementInput, outputs: list[Any]
    ) -> float:
        """Run a forward, append its outputs to `outputs`, and return its time in microseconds.

        Args:
            unit: The layer.
            values: Inputs of the layer, which are no leaves of the autograd graph.
            received: Structure of the inputs, and targets of the loss.
            outputs: List to which the outputs of the layer are appended.
        """

        def begun() -> None:
            entry_us = self.clock.restart()
            if self.note_entry is not None:
                self.note_entry(unit, received, entry_us)
                self.clock.restart()

        if isinstance(unit.module, ModelStage):
            # Skipping earlier modules occurs once per stage, so its time is no part of the layer's.
            unit.module.call_at_stage_ends(begun=begun, done=self.clock.stop)

        def run() -> None:
            with self.statistics.collecting():
                outputs.extend(unit.run(values, received))

        with self._context(unit.module):
            return self.clock.time_us(run)

    def backward_us(self, unit: LayerToMeasure, end: Tensor) -> tuple[float, float]:
        """Run the backward from `end` and return (0, time in microseconds). Only a `SplitTimer` times two passes."""
        backward_us = self.clock.time_us(end.backward)
        if is_large(unit):  # two copies of the gradients may not fit in memory, so adding is timed separately
            gradients = [p.grad for p in unit.module.parameters() if p.grad is not None]
            backward_us += sum(_adding_us(gradient, self.clock) for gradient in gradients)
            _take_gradients(unit)
        return 0.0, backward_us

    def _context(self, _module: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True, kw_only=True)
class SplitTimer(UnsplitBackwardTimer):
    """Timer of a layer's forward and split backward (input gradients I, weight gradients W)."""

    split: SplitBackward

    def backward_us(self, unit: LayerToMeasure, end: Tensor) -> tuple[float, float]:
        """Run the input-gradient and weight-gradient passes from `end`, and return their times in microseconds."""
        one = torch.ones_like(end)
        deferred: DeferredUses = []
        input_us = self.clock.time_us(lambda: deferred.extend(self.split.backward_input([end], [one])))
        made_by_input = {p for p in unit.module.parameters() if p.grad is not None}
        weight_us = self.clock.time_us(lambda: self.split.backward_weight(deferred)) if deferred else 0.0
        if is_large(unit):
            made = {p: p.grad for p in unit.module.parameters() if p.grad is not None}
            input_us += sum(_adding_us(gradient, self.clock) for p, gradient in made.items() if p in made_by_input)
            weight_us += sum(_adding_us(gradient, self.clock) for p, gradient in made.items() if p not in made_by_input)
            _take_gradients(unit)
        return input_us, weight_us

    def _context(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self.split.splitting(module)


def _empty_layer(unit: LayerToMeasure) -> tuple[LayerToMeasure, MeasurementInput]:
    """Return a layer that computes nothing, on the device and in the precision of `unit`, and its input."""
    values, spec = tree_flatten(torch.zeros(1, device=unit.device, requires_grad=True))
    nothing = replace(unit, name="nothing", module=nn.Identity(), loss_fn=None, digest="")
    return nothing, MeasurementInput(tuple(values), spec, None)


class _TurnTimes(NamedTuple):
    """Times of one run of a layer."""

    forward_us: float
    input_us: float
    """Time of the input-gradient pass; 0 if the backward is not split."""
    backward_us: float
    """Time of the backward; of the weight-gradient pass if the backward is split."""


class _Turn:
    def __init__(self, unit: LayerToMeasure, received: MeasurementInput) -> None:
        if not is_large(unit):
            fill_missing_gradients(unit)
        self._unit = unit
        self._received = received
        self._own_storages = own_storages_of(unit)
        self._entrance = make_layer_inputs(received) if tensors_fit_in_cache(received.values) else None
        self._outputs: list[Any] = []
        self._exit: LayerOutputs | None = None
        self._forward_us = 0.0
        self.is_stage = isinstance(unit.module, ModelStage)

    def forward(self, timer: UnsplitBackwardTimer, before: "_Turn | None") -> None:
        if self._entrance is None:
            self._entrance = make_layer_inputs(
                self._received, *(() if before is None else (before._outputs, before._own_storages))
            )
        self._forward_us = timer.forward_us(self._unit, self._entrance.values, self._received, self._outputs)

    def release_tensors(self) -> None:
        assert self._entrance is not None
        self._entrance.values.clear()
        self._exit = LayerOutputs(self._outputs, self._own_storages)
        if tensors_fit_in_cache(self._outputs):
            self._exit.create_gradients(None)
        self._outputs.clear()

    def backward(self, timer: UnsplitBackwardTimer, next_turn: "_Turn | None") -> _TurnTimes:
        assert self._exit is not None
        if self._exit.end is None:
            return _TurnTimes(self._forward_us, 0.0, 0.0)
        self._exit.create_gradients(None if next_turn is None else next_turn._entrance)
        return _TurnTimes(self._forward_us, *timer.backward_us(self._unit, self._exit.end))


def time_once(timer: UnsplitBackwardTimer, unit: LayerToMeasure, received: MeasurementInput) -> tuple[float, float]:
    """Return the times of forward and backward of one micro-batch of one layer, in microseconds.

    Args:
        timer: Timer of the passes. With a `SplitTimer`, the times are those of the forward plus the input-gradient
            pass, and of the weight-gradient pass.
        unit: The layer.
        received: Input of the layer.
    """
    if not is_large(unit):
        fill_missing_gradients(unit)
    outputs: list[Any] = []
    forward_us = timer.forward_us(unit, received.non_leaf_copies(), received, outputs)
    exit_point = LayerOutputs(outputs, own_storages_of(unit))
    if exit_point.end is None:
        return forward_us, 0.0
    exit_point.create_gradients(None)
    input_us, backward_us = timer.backward_us(unit, exit_point.end)
    return forward_us + input_us, backward_us


def time_neighbors(
    timer: UnsplitBackwardTimer, layers: Sequence[tuple[LayerToMeasure, MeasurementInput]]
) -> list[tuple[float, float]]:
    """Return times like those of `time_once` for consecutive layers: all forwards run first, then all backwards."""
    # When forward and backward of each layer were timed alternately, the forwards of a small U-Net took a fifth longer
    # than in the model, and the forwards of an MLP twice as long.
    turns = [_Turn(*layer) for layer in layers]
    nothing = _Turn(*_empty_layer(layers[0][0]))  # its times are the overhead of timing a layer
    middle = len(turns) // 2
    for n, (before, turn) in enumerate(zip([None, *turns], turns, strict=False)):
        if n == middle:
            nothing.forward(timer, None)
        turn.forward(timer, before)
    for turn in (*turns, nothing):
        turn.release_tensors()
    backward_times: list[tuple[_TurnTimes, bool]] = []
    next_turn = None
    while turns:
        turn = turns.pop()
        backward_times.append((turn.backward(timer, next_turn), turn.is_stage))
        next_turn = turn
        if len(turns) == middle:
            of_nothing = nothing.backward(timer, None)
    return [_own_times(times, of_nothing, is_stage=is_stage) for times, is_stage in reversed(backward_times)]


def _own_times(times: _TurnTimes, of_nothing: _TurnTimes, *, is_stage: bool) -> tuple[float, float]:
    # The clock of a `ModelStage` starts at its first layer, so the forward has no overhead to subtract.
    forward_us = times.forward_us if is_stage else max(0.0, times.forward_us - of_nothing.forward_us)
    input_us = max(0.0, times.input_us - of_nothing.input_us)
    return forward_us + input_us, max(0.0, times.backward_us - of_nothing.backward_us)


def _adding_us(gradient: Tensor, clock: Clock) -> float:
    """Return the time in microseconds to add a gradient to an existing one. Neither gradient is in a cache."""
    flat = gradient.as_strided((gradient.numel(),), (1,))
    totals = torch.zeros_like(flat[: CACHE_BYTES // flat.element_size()])
    adding_us = 0.0
    for part in flat.split(len(totals)):
        existing = totals[: len(part)]
        adding_us += clock.time_us(partial(_add, existing, part))
    return adding_us


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


def is_large(unit: LayerToMeasure) -> bool:
    """Return True if the parameters of one layer have more than `CACHE_BYTES`."""
    return unit.parameter_bytes > CACHE_BYTES


def _take_gradients(unit: LayerToMeasure) -> None:
    unit.module.zero_grad()
    # Garbage of the run would fragment the released memory. All of it is in the youngest generation.
    gc.collect(0)


def fill_missing_gradients(unit: LayerToMeasure) -> None:
    """Set missing gradients to zeros, so that a backward adds to existing gradients."""
    for parameter in unit.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
