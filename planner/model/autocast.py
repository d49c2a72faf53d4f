"""Running layers under `torch.autocast`.

Under autocast every layer is given low-precision copies of its weights, which torch makes when they are first needed
and keeps until the outermost context is left. So one context (`keeping_casts`) is open around all micro-batches of a
step, and each copy exists once. Layers and loss run with autocast switched on inside it (`layers_in`), backward does
not: its operators run in the dtypes that forward chose.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from planner.core.values.precision import Precision

__all__ = ["autocast_dtype", "keeping_casts", "layers_in"]

_AUTOCAST: dict[Precision, torch.dtype] = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """What autocast computes in; None without autocast."""
    return _AUTOCAST.get(precision)


def layers_in(precision: Precision, device: torch.device, *, keep: bool = True) -> AbstractContextManager[Any]:
    """The context in which layers and loss run; without `keep`, copies of weights are made anew wherever needed."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=keep)


def keeping_casts(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """A context that keeps autocast's copies of weights while it is open; it does not switch autocast on."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, enabled=False)
