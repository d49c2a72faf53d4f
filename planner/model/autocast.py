"""Run layers under `torch.autocast`.

Under autocast, torch makes low-precision copies of weights when they are first needed. It caches the copies until the
outermost autocast context ends. So one context (`weight_cast_cache`) is open around all micro-batches of a step, and
each copy is made once. Layers and loss run with autocast enabled inside this context (`forward_context`). Backward runs
without autocast, because its operators use the dtypes that forward chose.

Releases of torch before 2.11 also cache copies that are made under `no_grad` and have no autograd graph. A weight whose
copy has no graph gets no gradient (pytorch/pytorch#165068). With these releases, code under `no_grad` does not use the
cache (`caching_only_with_graph`).
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
    """Return the dtype in which autocast computes; None if `precision` does not use autocast."""
    return _AUTOCAST.get(precision)


def forward_context(precision: Precision, device: torch.device, *, cached: bool = True) -> AbstractContextManager[Any]:
    """Return the context manager for layers and loss: autocast if `precision` uses it, with a weight cache if `cached`.

    Args:
        precision: Precision of the model.
        device: Device of the layers.
        cached: True to let autocast cache its copies of weights; otherwise each use of a weight makes a new copy.
    """
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext()
    autocast = torch.autocast(device.type, dtype=dtype, cache_enabled=cached)
    # An evaluation records no graph, so it may use cached copies that have none.
    needs_care = cached and torch.is_grad_enabled() and not _copies_have_graphs()
    return _with_care(autocast) if needs_care else autocast


def weight_cast_cache(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which autocast keeps its cached weight copies. It does not enable autocast."""
    # Autocast clears the cache when its outermost context ends. This context is the outermost.
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext()
    if device.type != "cpu":
        _keep_casts_in_backwards(device)
    return torch.autocast(device.type, dtype=dtype, enabled=False)


@cache
def _keep_casts_in_backwards(device: torch.device) -> None:
    # A device's backwards run in a thread of their own, outside of `weight_cast_cache`. There, the end of an autocast
    # context would clear the cache of all threads, for example after a recomputation. With a context that never ends in
    # that thread, only `weight_cast_cache` clears it.
    with torch.enable_grad():
        result = torch.zeros((), device=device, requires_grad=True) + 0
    assert result.grad_fn is not None
    result.grad_fn.register_prehook(_begin_endless_context)
    result.backward()


def _begin_endless_context(_gradients: Any) -> None:
    torch.autocast_increment_nesting()


def caching_only_with_graph() -> AbstractContextManager[None]:
    """Return a context manager in which autocast caches only weight copies that have an autograd graph."""
    return nullcontext() if torch.is_grad_enabled() or _copies_have_graphs() else _without_cache()


@cache
def _copies_have_graphs() -> bool:
    """Return True if every cached weight copy has an autograd graph (torch 2.11 and later)."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight.detach(), weight)
        with torch.enable_grad():
            return torch.mm(weight.detach(), weight).requires_grad


@contextmanager
def _with_care(autocast: torch.autocast) -> Iterator[None]:
    with autocast, _CacheGuard():
        yield


class _CacheGuard(TorchFunctionMode):
    """Torch function mode that disables autocast's weight cache while gradients are disabled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The common case comes first, for speed. `torch.compile` traces code without this mode.
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
