"""Calls of torch's functions by a module's own code, between the calls of its submodules.

Such a call is known by its place: the gap between submodules that it lies in, its name, and how many calls of that name
were before it in the gap. Whoever runs the same code finds it there again.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

Called = tuple[str, int]
"""A call in a gap: the function's name, and how many calls of that name were before it in the gap."""

Run = Callable[[Called, Callable[[], Any]], Any]


class FunctionWatch(TorchFunctionMode):
    """Hands over the calls of torch's functions that are made in gaps.

    Gaps begin and end while the model's code is at work, which may enter and leave modes of its own meanwhile. So this
    one lies below those, and is taken out of the stack from wherever it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._depth = _len_torch_function_stack()
        self._counts: Counter[str] = Counter()
        self._is_running = False

    def begin_gap(self, run: Run) -> None:
        """From here on `run` gets each call and what makes it; what it returns is what the model's code gets."""
        if self._run is not None:
            return  # a function that calls modules: torch has taken the mode out, and puts it back behind
        self._run = run
        self._counts.clear()
        modes = _emptied_stack()
        for mode in (*modes[: self._depth], self, *modes[self._depth :]):
            _push_mode(mode)

    def end_gap(self) -> None:
        """Calls are no longer handed over."""
        if self._run is None or self._is_running:
            return
        # Whoever runs the calls has this one, and tensors: a cycle would keep them.
        self._run = None
        for mode in _emptied_stack():
            if mode is not self:
                _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hands over one call."""
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
    """Return True within a function that `torch.vmap` transforms: its tensors stand for one sample, and have no memory.

    Modules that are called there are part of the code around the transform.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def _emptied_stack() -> list[TorchFunctionMode]:
    """The modes that were in it, from the outermost."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
