"""Measure the memory of one layer, in a form from which the peak memory of any stage can be computed.

`planner.core.cost.costs` does this computation. The measurement follows these rules:

- A peak counts from the memory in use when the layer starts. The inputs already exist then.
- Inputs are no leaves of the autograd graph, because autograd forbids layers to write into leaves.
- Output gradients are created inside the backward, as within a stage. No other reference keeps them in memory.
- Under autocast, micro-batches share copies of weights. These are counted separately (`measure_weight_casts`).
- Backward is measured twice: without parameter gradients, so that it allocates them, and with gradients, to which it
adds. Both measurements are repeated with outputs and their gradients in memory, as at the end of a stage.
- An input or output counts as kept for backward if its storage exists after all other references are dropped.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from planner.core.values.profile import BoundaryTensor, MemoryDetail
from planner.device.meter import MemoryMeter
from planner.model.attributes import AttributeSnapshot
from planner.model.ghosts import storage_key, storage_of
from planner.model.refusals import sparse_gradient_error
from planner.model.stage import ModelStage
from planner.profile.units import LayerToMeasure, MeasurementInput


def measure_memory(
    unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter, buffer_bytes: int
) -> MemoryDetail:
    """Return the memory of a layer for one micro-batch, in bytes, and delete its gradients.

    Args:
        unit: Layer to measure.
        received: Input of the layer.
        meter: Meter of the device.
        buffer_bytes: Bytes of the layer's buffers before the layer has run for the first time.

    Raises:
        ModelError: The layer has sparse gradients.
    """
    # The first pass creates objects that belong to no micro-batch: cached tables and workspaces of libraries.
    _WholePass(unit, received, meter)
    if any(p.grad is not None and p.grad.is_sparse for p in unit.module.parameters()):
        raise sparse_gradient_error(f'layer "{unit.name}"')
    unit.module.zero_grad()
    casts_bytes = measure_weight_casts(unit, received, meter)
    with unit.weight_cast_cache():
        end_first = _end_backward_peak(unit, received, meter)
        unit.module.zero_grad()
    with unit.weight_cast_cache():
        # In the first micro-batch, the forward makes autocast's copies of weights, and the backward converts their
        # gradients to those of the parameters. Later micro-batches find the copies in autocast's cache.
        first = _WholePass(unit, received, meter)
        later = _WholePass(unit, received, meter)
        end_later = _end_backward_peak(unit, received, meter)
        unit.module.zero_grad()
        attribute_bytes, renewed_bytes = _attribute_bytes(unit, received, meter)
        grown_bytes = sum(buffer.nbytes for buffer in unit.module.buffers()) - buffer_bytes
        inputs, outputs = _boundaries(unit, received)
        return MemoryDetail(
            internal_bytes=max(0, later.internal_bytes),
            inputs=inputs,
            outputs=outputs,
            forward_peak_bytes=later.forward_peak_bytes,
            no_grad_peak_bytes=_no_grad_peak(unit, received, meter),
            first_backward_peak_bytes=max(0, first.backward_peak_bytes - casts_bytes),
            backward_peak_bytes=max(0, later.backward_peak_bytes),
            end_first_backward_peak_bytes=max(0, end_first - casts_bytes),
            end_backward_peak_bytes=max(0, end_later),
            writes_input=later.writes_input,
            target_bytes=sum(t.nbytes for t in tree_flatten(received.targets)[0] if isinstance(t, Tensor)),
            attribute_bytes=attribute_bytes + max(0, grown_bytes),
            renewed_bytes=renewed_bytes,
        )


def measure_weight_casts(unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter) -> int:
    """Return the bytes of autocast's weight copies of a layer, which stay in its cache between micro-batches.

    Args:
        unit: Layer to measure.
        received: Input of the layer.
        meter: Meter of the device.
    """
    with unit.weight_cast_cache():
        # Inputs and outputs are dropped within the measurement, so that at its end only the copies are left. An input
        # into which the layer writes would keep the layer's graph.
        return max(0, meter.measure(lambda: unit.run(received.non_leaf_copies(), received)).end_bytes)


def backward_root(outputs: Sequence[Any]) -> Tensor | None:
    """Return a scalar whose backward gives every output a gradient of ones; None if no output requires a gradient."""
    carrying = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if not carrying:
        return None
    started: Tensor = _GradientSource.apply(*carrying)  # type: ignore[no-untyped-call]
    return started


def view_gradient_names(unit: LayerToMeasure, received: MeasurementInput) -> frozenset[str]:
    """Return the names of parameters whose gradient is a view, such as the transposed product of a linear layer."""
    names: set[str] = set()

    def note(name: str, gradient: Tensor) -> None:
        # Autograd adds in place only to a gradient that nothing else refers to, and a view refers to its base.
        if gradient._is_view():
            names.add(name)

    hooks = [p.register_hook(partial(note, name)) for name, p in unit.module.named_parameters() if p.requires_grad]
    started = backward_root(unit.run(received.non_leaf_copies(), received))
    if started is not None:
        started.backward()
    for hook in hooks:
        hook.remove()
    unit.module.zero_grad()
    return frozenset(names)


class _GradientSource(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        # Empty tensors take no memory. They are created from the outputs, so that ghosts give ghosts.
        ctx.like = [(output.new_empty(0), output.shape) for output in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        return tuple(like.new_ones(shape) for like, shape in ctx.like)


class _WholePass:
    def __init__(self, unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter) -> None:
        values = received.non_leaf_copies()
        outputs: list[Any] = []
        started: list[Tensor | None] = []
        versions = _versions(values)
        forward = meter.measure(lambda: outputs.extend(unit.run(values, received)))
        self.writes_input = _versions(values) != versions
        self.forward_peak_bytes = forward.peak_bytes
        before = _storages([*values, *unit.module.parameters(), *unit.module.buffers()])
        created = {key: size for key, size in _storages(outputs).items() if key not in before}
        self.internal_bytes = forward.end_bytes - sum(created.values())

        def drop() -> None:
            started.append(backward_root(outputs))
            outputs.clear()

        dropped = meter.measure(drop)
        held = forward.end_bytes + dropped.end_bytes
        self.backward_peak_bytes = held
        if started[0] is not None:
            backward = meter.measure(started.pop().backward)  # type: ignore[union-attr]
            self.backward_peak_bytes += backward.peak_bytes


def _end_backward_peak(unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter) -> int:
    values = received.non_leaf_copies()
    outputs: list[Any] = []
    gradients: list[Tensor] = []
    forward = meter.measure(lambda: outputs.extend(unit.run(values, received)))
    carrying = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    created = meter.measure(lambda: gradients.extend(torch.ones_like(output) for output in carrying))
    held = forward.end_bytes + created.end_bytes
    if not carrying:
        return held
    return held + meter.measure(lambda: torch.autograd.backward(carrying, gradients)).peak_bytes


def _attribute_bytes(unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter) -> tuple[int, int]:
    """Return the bytes of all tensors in plain attributes, and of those that each forward creates for its backward."""
    held = _storages([*unit.module.parameters(), *unit.module.buffers()])
    parts = unit.module.state_modules if isinstance(unit.module, ModelStage) else unit.module.modules()
    # Only sizes are kept, no tensors, so that the next forward can release the tensors that it replaces.
    sizes = _storages(AttributeSnapshot(("", part) for part in parts).current_tensors())
    loose = {key: size for key, size in sizes.items() if key not in held}
    if not loose:
        return 0, 0

    kept: list[Any] = []

    def added() -> int:
        values, outputs = received.non_leaf_copies(), list[Any]()
        kept.append(outputs)
        return meter.measure(lambda: outputs.extend(unit.run(values, received))).end_bytes

    alone, beside = added(), added()
    return sum(loose.values()), max(0, beside - alone)


def _no_grad_peak(unit: LayerToMeasure, received: MeasurementInput, meter: MemoryMeter) -> int:
    with torch.no_grad():
        values = received.non_leaf_copies()
        return meter.measure(lambda: unit.run(values, received)).peak_bytes


def _boundaries(
    unit: LayerToMeasure, received: MeasurementInput
) -> tuple[tuple[BoundaryTensor, ...], tuple[BoundaryTensor, ...]]:
    values = received.non_leaf_copies()
    outputs = unit.run(values, received)
    started = backward_root(outputs)
    keys = [storage_key(tensor) for tensor in (*values, *outputs) if isinstance(tensor, Tensor)]
    input_sizes = [value.nbytes for value in values if isinstance(value, Tensor)]
    # A parameter or buffer that the layer returns does not count for each micro-batch.
    fixed = _storages([*unit.module.parameters(), *unit.module.buffers()])
    tensors = (output for output in outputs if isinstance(output, Tensor))
    output_sizes = [0 if storage_key(output) in fixed else storage_of(output).nbytes() for output in tensors]
    carry = [tensor.requires_grad for tensor in (*values, *outputs) if isinstance(tensor, Tensor)]
    watched = [StorageWeakRef(storage_of(t)) for t in (*values, *outputs) if isinstance(t, Tensor)]
    values.clear()
    outputs.clear()
    kept = [not watch.expired() for watch in watched]
    del started
    num = len(input_sizes)
    inputs = [
        BoundaryTensor(bytes=size, kept=keep, carries=carries)
        for size, keep, carries in zip(input_sizes, kept[:num], carry[:num], strict=True)
    ]
    # The source of an output is the first tensor with the same storage: an input, or an earlier output.
    sources = [first if (first := keys.index(keys[place])) < place else -1 for place in range(num, len(keys))]
    results = [
        BoundaryTensor(bytes=size, kept=keep, alias=source, relayed=passes, carries=carries)
        for size, keep, source, passes, carries in zip(
            output_sizes, kept[num:], sources, _relayed(unit, received, sources), carry[num:], strict=True
        )
    ]
    return tuple(inputs), tuple(results)


def _relayed(unit: LayerToMeasure, received: MeasurementInput, sources: Sequence[int]) -> list[bool]:
    """Return, for each output, True if it is an unchanged input.

    `sources[n]` is the index of the input with the storage of output n, or a number that is no input's index.
    """
    leaves = received.new_leaf_copies()
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(source in range(len(inputs)) for source in sources):
        return [False] * len(sources)
    # The layer runs on copies of the leaves, because it may write into its inputs.
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    outputs = [output for output in unit.run(values, received) if isinstance(output, Tensor)]
    carrying = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in inputs if leaf.requires_grad]
    created = {id(output): torch.ones_like(output) for output in carrying}
    input_gradients: Sequence[Tensor | None] = ()
    if carrying and wanted:
        input_gradients = torch.autograd.grad(carrying, wanted, list(created.values()), allow_unused=True)
    handed = {
        id(leaf): gradient for leaf, gradient in zip(wanted, input_gradients, strict=False) if gradient is not None
    }

    # The gradient of an unchanged input has the storage of the output's gradient.
    def passes(output: Tensor, source: int) -> bool:
        if source not in range(len(inputs)) or not output.requires_grad:
            return source in range(len(inputs))
        gradient = handed.get(id(inputs[source]))
        return gradient is not None and storage_key(gradient) == storage_key(created[id(output)])

    return [passes(output, source) for output, source in zip(outputs, sources, strict=True)]


def _versions(values: Sequence[Any]) -> list[int]:
    # Autograd counts the writes into each tensor.
    return [value._version for value in values if isinstance(value, Tensor)]


def _storages(values: Sequence[Any]) -> dict[int, int]:
    return {storage_key(value): storage_of(value).nbytes() for value in values if isinstance(value, Tensor)}
