"""Detect code of the model in a backward: hooks, autograd functions, and forwards that a checkpoint runs again.

Such code may read an attribute that the forward of a later micro-batch has already replaced. Torch's own backward
reads only the graph.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LIBRARIES = frozenset(("torch", "planner", *sys.stdlib_module_names))
"""Packages whose code in a backward reads no attributes of the model."""


@contextmanager
def record_called_functions(functions: list[str]) -> Iterator[None]:
    """Append to `functions` the names of functions that this thread calls in the block, except in `_LIBRARIES`."""

    def see(frame: FrameType, event: str, _argument: Any) -> None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if event == "call" and package not in _LIBRARIES:
            functions.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield
    finally:
        # The profiler of `cProfile` is not callable, and cannot be set again.
        sys.setprofile(before if callable(before) else None)
