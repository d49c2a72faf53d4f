"""Intercept calls of torch functions by a module's own code, in the gaps between the calls of its submodules.

A function call is identified by its gap, the function's name, and the number of earlier calls of that function in the
gap. If the code runs again, the same call has the same identification.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

FunctionCall = tuple[str, int]
"""Function call in a gap between calls of submodules.

The items are the function's name and the number of earlier calls of this function in the gap."""

Interceptor = Callable[[FunctionCall, Callable[[], Any]], Any]
"""Function of (call, function that makes the call), which runs instead of a torch function and returns the result."""


_READ_MEMORY = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Methods that read the values of a tensor without an operator. A recorder of operators misses these reads."""


class FunctionWatch(TorchFunctionMode):
    """Torch function mode that intercepts function calls of a module's own code."""

    def __init__(self) -> None:
        super().__init__()
        self._run: Interceptor | None = None
        self._depth = _len_torch_function_stack()
        self._counts: Counter[str] = Counter()
        self._is_running = False

    def start_intercepting(self, run: Interceptor) -> None:
        """Replace each following call of a torch function by a call of `run`."""
        if self._run is not None:
            return  # A function that calls modules is running. Torch removed the mode and restores it after the call.
        self._run = run
        self._counts.clear()
        # The model's code may enter and leave other modes at any time, so this mode is inserted below them.
        modes = _empty_mode_stack()
        for mode in (*modes[: self._depth], self, *modes[self._depth :]):
            _push_mode(mode)

    def stop_intercepting(self) -> None:
        """Stop intercepting calls."""
        if self._run is None or self._is_running:
            return
        # `run` refers to this object and to tensors: a reference cycle would keep the tensors alive.
        self._run = None
        for mode in _empty_mode_stack():
            if mode is not self:
                _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept one call."""
        if func in _READ_MEMORY and args[0].layout == torch.strided and not args[0].is_quantized:
            torch.equal(args[0], args[0])  # an operator that reads values, like `.item()`
        run = self._run
        assert run is not None, "outside of gaps the mode is in no stack"
        name = getattr(func, "__name__", "")
        called = name, self._counts[name]
        self._counts[name] += 1
        self._is_running = True
        try:
            return run(called, lambda: func(*args, **(kwargs or {})))
        finally:
            self._is_running = False


def is_in_vmap() -> bool:
    """Return True while `torch.vmap` runs a function."""
    # Tensors in a vmap represent one sample and have no memory, so calls of modules there are not recorded.
    return torch._C._functorch.peek_interpreter_stack() is not None


def _empty_mode_stack() -> list[TorchFunctionMode]:
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
