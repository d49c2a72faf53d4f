"""Count the floating-point operations (FLOPs) of operators as they run.

A multiply-add counts as two operations, as in data sheets. Only products, convolutions and attention are counted.
Memory limits the speed of element-wise operators, not arithmetic.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from planner.model.operators import OperatorWatch
from planner.profile.units import LayerToMeasure, MeasurementInput

GROUPED_PRODUCT = "aten::_grouped_mm"
"""Operator that multiplies tokens by the weights of their experts."""


def forward_flops(unit: LayerToMeasure, received: MeasurementInput, operators: set[str] | None = None) -> int:
    """Run a layer's forward once and return its number of floating-point operations.

    Args:
        unit: The layer.
        received: Input of the layer.
        operators: Set to which the names of all operators are added, or None.
    """
    flops = 0

    def add(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        nonlocal flops
        with suppress(AssertionError):  # older releases of torch have no formula for attention with grouped queries
            flops += operator_flops(func, args, kwargs, result)
        if operators is not None:
            operators.add(func._schema.name)

    with OperatorWatch(after=add):
        unit.run(received.non_leaf_copies(), received)
    return flops


def operator_flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the number of floating-point operations of one call of an operator.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: Its result.
    """
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    if func._schema.name == GROUPED_PRODUCT:
        return _grouped_flops(args[0], args[1])
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[-2] * b.numel()
    return 2 * a.numel() * b.shape[-1]
