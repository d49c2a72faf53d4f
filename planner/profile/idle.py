"""Find parameters that no output of their layer depends on, such as those of an unused head.

These parameters never get a gradient, so most optimizers create no state for them.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.chain import tied_parameters
from planner.model.nests import tensors_in
from planner.model.operators import OperatorWatch, depends_on_values
from planner.profile.optimizer import trained_parameters
from planner.profile.records import LayerRecords
from planner.profile.task import ProfilingTask
from planner.profile.units import LayerToMeasure, MeasurementInput


def parameters_without_gradients(task: ProfilingTask, records: LayerRecords) -> dict[str, frozenset[str]]:
    """Return the names of trained parameters that never get a gradient, by digest of the layer.

    The names are those in the first layer with the digest. Parameters that several layers share are left out.
    """
    idle = {
        digest: _without_gradient(unit, records.inputs[digest, records.sizes[0]])
        for digest, unit in records.distinct.items()
    }
    tied = tied_parameters(task.chain.layers)
    for layer, unit in zip(task.chain.layers, records.units, strict=True):
        names = zip(
            layer.parameters_by_name(), dict(records.distinct[unit.digest].module.named_parameters()), strict=True
        )
        idle[unit.digest] -= {name for full, name in names if full in tied}
    return idle


def parameters_with_gradients(records: LayerRecords, idle: Mapping[str, Collection[str]]) -> list[list[nn.Parameter]]:
    """Return each layer's trained parameters, without those in `idle` (from `parameters_without_gradients`)."""
    return [
        trained_parameters(unit.module, records.translate_parameter_names(n, idle[unit.digest]))
        for n, unit in enumerate(records.units)
    ]


def _without_gradient(unit: LayerToMeasure, received: MeasurementInput) -> frozenset[str]:
    asks: list[bool] = []

    def ran(func: Any, args: Any, kwargs: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        # Reading a boolean is mostly a check of an input, such as whether a mask hides anything.
        is_check = func is torch.ops.aten._local_scalar_dense.default and given[0].dtype is torch.bool
        asks.append(depends_on_values(func, given) and not is_check)

    unit.module.zero_grad()
    with OperatorWatch(before=ran):
        outputs = unit.run(received.non_leaf_copies(), received)
    if any(asks):  # the code depends on tensor values, so a parameter may get a gradient for other values
        return frozenset()
    carrying = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if carrying:
        torch.autograd.backward(carrying, [torch.ones_like(output) for output in carrying])
    names = frozenset(name for name, p in unit.module.named_parameters() if p.requires_grad and p.grad is None)
    unit.module.zero_grad()
    return names
