"""Count the floating-point operations of a layer's forward with fvcore, on its traced graph.

fvcore counts a multiply-add as one; we store two, as data sheets do. It does not know fused attention and counts 0 for
it, so its formula is given here. Element-wise operators are not counted: they are bound by memory, not arithmetic.
"""

import logging
import math
import warnings
from typing import Any

from torch import nn
from torch.utils._pytree import tree_unflatten

from planner.profile.units import Unit, UnitInput

with warnings.catch_warnings():
    # It compiles functions with `torch.jit.script` as it is imported, of which newer releases of torch warn.
    warnings.simplefilter("ignore")
    from fvcore.nn import FlopCountAnalysis


def forward_flops(unit: Unit, received: UnitInput) -> int:
    """Return the operations of one forward; 0 if the layer cannot be traced."""
    value = tree_unflatten([v.detach() if hasattr(v, "detach") else v for v in received.values], received.spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("fvcore").setLevel(logging.ERROR)
        try:
            counter = FlopCountAnalysis(_Takes(unit.module), (value,))
            counter.set_op_handle("aten::scaled_dot_product_attention", _attention)
            counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
            return 2 * int(counter.total())
        except Exception:  # a layer that torch.jit.trace refuses: the figure is informative, not needed for planning
            return 0


class _Takes(nn.Module):
    """Wrapper that passes one argument unchanged (the tracer would spread a tuple into several)."""

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
