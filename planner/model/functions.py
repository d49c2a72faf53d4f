"""Watch calls of torch's functions by a module's own code, between the calls of its submodules.

Such a call is identified by its position: the gap between submodules that it is in, its name, and the number of earlier
calls of that name in the gap. Code that runs again makes the same call at the same position.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

Called = tuple[str, int]
"""Call in a gap: the function's name, and the number of earlier calls of that name in the gap."""

Run = Callable[[Called, Callable[[], Any]], Any]


class FunctionWatch(TorchFunctionMode):
    """Mode that intercepts the calls of torch's functions in gaps.

    Gaps begin and end while the model's code runs, which may enter and leave modes of its own. So this mode is placed
    below those in the stack, and removed from wherever it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._depth = _len_torch_function_stack()
        self._counts: Counter[str] = Counter()
        self._is_running = False

    def begin_gap(self, run: Run) -> None:
        """Pass each of the following calls to `run`, with a function that makes the call; `run` returns the result."""
        if self._run is not None:
            return  # A function that calls modules: torch has removed the mode, and puts it back after the call.
        self._run = run
        self._counts.clear()
        modes = _emptied_stack()
        for mode in (*modes[: self._depth], self, *modes[self._depth :]):
            _push_mode(mode)

    def end_gap(self) -> None:
        """Stop intercepting calls."""
        if self._run is None or self._is_running:
            return
        # `run` refers to this object and to tensors: a reference cycle would keep the tensors alive.
        self._run = None
        for mode in _emptied_stack():
            if mode is not self:
                _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept one call."""
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


def in_transform() -> bool:
    """Return True within a function that `torch.vmap` transforms: its tensors represent one sample and have no memory.

    Modules that are called there are part of the code around the transform.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def _emptied_stack() -> list[TorchFunctionMode]:
    """Empty the stack of modes and return its modes, from the outermost."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
