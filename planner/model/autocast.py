"""Running layers under `torch.autocast`.

Under autocast every layer is given low-precision copies of its weights, which torch makes when they are first needed
and keeps until the outermost context is left. So one context (`keeping_casts`) is open around all micro-batches of a
step, and each copy exists once. Layers and loss run with autocast switched on inside it (`layers_in`), backward does
not: its operators run in the dtypes that forward chose.

Until 2.11 torch kept a copy as it was first made: without a graph, if that was under `no_grad`, and who used it later
passed the weight no gradient (pytorch/pytorch#165068). What is recomputed first runs so. There, with such a torch, it
neither takes copies nor leaves any (`caching_only_with_graph`): each micro-batch makes its own and drops them at once.
The same goes for what a model's own autograd functions call, such as those that recompute.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner.core.values.precision import Precision

_AUTOCAST: dict[Precision, torch.dtype] = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """What autocast computes in; None without autocast."""
    return _AUTOCAST.get(precision)


def layers_in(precision: Precision, device: torch.device, *, keep: bool = True) -> AbstractContextManager[Any]:
    """The context in which layers and loss run; without `keep`, copies of weights are made anew wherever needed."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext()
    autocast = torch.autocast(device.type, dtype=dtype, cache_enabled=keep)
    # Where there is no graph at all, in an evaluation, copies are kept as they are.
    needs_care = keep and torch.is_grad_enabled() and not _copies_have_graphs()
    return _with_care(autocast) if needs_care else autocast


def keeping_casts(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """A context that keeps autocast's copies of weights while it is open; it does not switch autocast on."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, enabled=False)


def caching_only_with_graph() -> AbstractContextManager[None]:
    """A context that lets autocast keep no copy that would pass its weight no gradient; it is for recomputed layers."""
    return nullcontext() if torch.is_grad_enabled() or _copies_have_graphs() else _without_cache()


@cache
def _copies_have_graphs() -> bool:
    """Whether a copy that autocast makes under `no_grad` passes gradients on where it is used again."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight.detach(), weight)
        with torch.enable_grad():
            return torch.mm(weight.detach(), weight).requires_grad


@contextmanager
def _with_care(autocast: torch.autocast) -> Iterator[None]:
    with autocast, _Careful():
        yield


class _Careful(TorchFunctionMode):
    """Sees the functions that a model calls: some of them in the forward of an autograd function, without a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What `func` returns."""
        # Most have a graph, and a forward waits for this. What is compiled is compiled without this mode.
        if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        with _without_cache():
            return func(*args, **(kwargs or {}))


@contextmanager
def _without_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
