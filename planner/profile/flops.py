"""Count the floating-point operations of a layer's forward with fvcore, on its traced graph.

fvcore counts a multiply-add as one operation; profiles count two, as data sheets do. fvcore counts 0 for fused
attention, so this module adds a formula for it. Of the memory-bound operators, fvcore counts only normalizations.
"""

import logging
import math
import warnings
from typing import Any

from torch import nn
from torch.utils._pytree import tree_unflatten

from planner.profile.units import LayerToMeasure, MeasurementInput

with warnings.catch_warnings():
    # When imported, fvcore calls `torch.jit.script`, which newer releases of torch warn about.
    warnings.simplefilter("ignore")
    from fvcore.nn import FlopCountAnalysis


def forward_flops(unit: LayerToMeasure, received: MeasurementInput) -> int:
    """Return the number of floating-point operations of a layer's forward; 0 if it cannot be traced."""
    value = tree_unflatten([v.detach() if hasattr(v, "detach") else v for v in received.values], received.spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("fvcore").setLevel(logging.ERROR)
        try:
            counter = FlopCountAnalysis(_Takes(unit.module), (value,))
            counter.set_op_handle("aten::scaled_dot_product_attention", _attention)
            counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
            return 2 * int(counter.total())
        except Exception:  # torch.jit.trace refuses the layer; the number is informative only
            return 0


class _Takes(nn.Module):
    """Wrapper that passes a tuple as one argument to a layer."""

    # The tracer would spread the tuple into several arguments.

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Any) -> Any:
        return self.module(values[0] if len(values) == 1 else values)


def _attention(inputs: list[Any], _outputs: list[Any]) -> int:
    # Query (…, n, d), key (…, m, d): scores and weighted sum take n·m·d multiply-adds each, per head and sample.
    query, key = (tensor.type().sizes() for tensor in inputs[:2])
    multiply_adds: int = 2 * math.prod(query) * int(key[-2])
    return multiply_adds
