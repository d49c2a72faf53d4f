"""Measure the memory of a layer with a split backward: input-gradient pass I and weight-gradient pass W.

The result supplements the memory of the whole backward (`planner.profile.memory`). A peak counts from the memory in use
when I or W begins, which includes the inputs. During I, the next layer or the executor may keep the layer's outputs in
memory. So three peaks of I are measured:

    kept in memory           case
    nothing                  within a stage, if the next layer keeps no input for W
    outputs                  within a stage, if the next layer keeps its input for W
    outputs and gradients    at the end of a stage, by the executor
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from planner.core.values.profile import SplitMemory
from planner.device.meter import MemoryMeter
from planner.model.ghosts import storage_key, storage_of
from planner.model.split_backward import DeferredUses, SplitBackward
from planner.profile.memory import backward_root
from planner.profile.units import LayerToMeasure, MeasurementInput

_HeldElsewhere = Literal["nothing", "outputs", "outputs and gradients"]
"""Tensors that the next layer or the executor keeps in memory during I."""


def measure_split_memory(unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter) -> SplitMemory:
    """Return a layer's memory in both passes of a split backward, in bytes, and delete its parameters' gradients.

    Args:
        unit: Layer to measure.
        received: Input of the layer.
        meter: Meter of the device.
    """
    subject = _MeasuredUnit(unit=unit, received=received, meter=meter)
    with unit.weight_cast_cache(), subject.split.weight_cast_cache():
        # Autocast's copies of weights belong to no micro-batch, so an unmeasured forward makes them first.
        with subject.split.splitting(unit.module):
            unit.run(received.non_leaf_copies(), received)
        unit.module.zero_grad()
        first = _SplitPass(subject)
        first.run_weight_backward()
        later = _SplitPass(subject)
        later.run_weight_backward()
        with_output, at_end = (
            _SplitPass(subject, held_elsewhere="outputs"),
            _SplitPass(subject, held_elsewhere="outputs and gradients"),
        )
        unit.module.zero_grad()
        first_with_output = _SplitPass(subject, held_elsewhere="outputs")
        unit.module.zero_grad()
        first_at_end = _SplitPass(subject, held_elsewhere="outputs and gradients")
        unit.module.zero_grad()
    return SplitMemory(
        held_bytes=max(0, later.held_bytes),
        held_input_bytes=later.held_input_bytes,
        weight_gradient_bytes=first.weight_gradient_bytes,
        first_input_peak_bytes=max(0, first.input_peak_bytes),
        input_peak_bytes=max(0, later.input_peak_bytes),
        output_first_input_peak_bytes=max(0, first_with_output.input_peak_bytes),
        output_input_peak_bytes=max(0, with_output.input_peak_bytes),
        end_first_input_peak_bytes=max(0, first_at_end.input_peak_bytes),
        end_input_peak_bytes=max(0, at_end.input_peak_bytes),
        first_weight_peak_bytes=max(0, first.weight_peak_bytes),
        weight_peak_bytes=max(0, later.weight_peak_bytes),
    )


@dataclass(frozen=True, kw_only=True)
class _MeasuredUnit:
    unit: LayerToMeasure
    received: MeasurementInput
    meter: MemoryMeter
    split: SplitBackward = field(default_factory=SplitBackward)


class _SplitPass:
    def __init__(self, subject: _MeasuredUnit, *, held_elsewhere: _HeldElsewhere = "nothing") -> None:
        unit, received, split = subject.unit, subject.received, subject.split
        self._subject = subject
        self._alive_bytes = 0
        self._deferred: DeferredUses = []
        leaves: list[Any] = []
        values: list[Any] = []
        outputs: list[Any] = []

        def receive() -> None:
            leaves.extend(received.new_leaf_copies())
            values.extend(value.clone() if isinstance(value, Tensor) else value for value in leaves)

        # The inputs are created under the meter, because it will also see their release.
        self._run(receive)
        self._alive_bytes = 0
        with split.splitting(unit.module):
            self._run(lambda: outputs.extend(unit.run(values, received)))
        starts: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self._run(lambda: starts.append(_start(outputs, held_elsewhere)))
        engine = list(starts) if held_elsewhere == "outputs and gradients" else []
        before_bytes = _gradient_bytes(unit)
        self.input_peak_bytes = self._run(lambda: self._deferred.extend(split.backward_input(*starts.pop())))
        made_bytes = _gradient_bytes(unit) - before_bytes

        def let_go() -> None:
            outputs.clear()
            engine.clear()
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    leaf.grad = None

        self._run(let_go)
        # All references to the inputs are dropped, to see which of them stay alive for W.
        storages = {storage_key(value): storage_of(value) for value in values if isinstance(value, Tensor)}
        watched = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]
        storages.clear()
        values.clear()
        self.held_input_bytes = sum(size for watch, size in watched if not watch.expired())
        self.held_bytes = self._alive_bytes - made_bytes + self.held_input_bytes
        self.weight_peak_bytes = self.weight_gradient_bytes = 0

    def run_weight_backward(self) -> None:
        subject = self._subject
        before_bytes = _gradient_bytes(subject.unit)
        peak_bytes = subject.meter.measure(lambda: subject.split.backward_weight(self._deferred)).peak_bytes
        self.weight_peak_bytes = self.held_bytes + peak_bytes
        self.weight_gradient_bytes = _gradient_bytes(subject.unit) - before_bytes

    def _run(self, work: Callable[[], object]) -> int:
        usage = self._subject.meter.measure(work)
        peak_bytes = self._alive_bytes + usage.peak_bytes
        self._alive_bytes += usage.end_bytes
        return peak_bytes


def _start(outputs: list[Any], held_elsewhere: _HeldElsewhere) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    if held_elsewhere == "outputs and gradients":
        carrying = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
        return carrying, [torch.ones_like(output) for output in carrying]
    started = backward_root(outputs)
    if held_elsewhere == "nothing":
        outputs.clear()
    return ([], []) if started is None else ([started], [torch.ones_like(started)])


def _gradient_bytes(unit: LayerToMeasure) -> int:
    return sum(parameter.grad.nbytes for parameter in unit.module.parameters() if parameter.grad is not None)
