"""Hide torch's process group from the user's code, which then runs as in a plain loop.

Much code has branches such as `if dist.is_initialized(): dist.all_reduce(center)`. In a pipeline, other ranks run other
layers. They would never join this operation, so this rank would wait for them forever.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def hide_process_group() -> Iterator[None]:
    """Let `dist.is_initialized()` return False in the `with` block. Operations with an explicit group still work."""
    world = dist.group.WORLD
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = world


def hide_process_group_in_step(
    optimizer: torch.optim.Optimizer,
    step_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    is_skipped: Callable[[], bool] = lambda: False,
) -> None:
    """Let `dist.is_initialized()` return False in every `step()` of an optimizer, and in the `step_context` around it.

    Args:
        optimizer: Optimizer to change.
        step_context: Function that returns the context manager in which a step runs.
        is_skipped: Function that returns True if `step()` shall do nothing.
    """
    step = optimizer.step

    @wraps(step)
    def hidden_step(_self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_skipped():
            return None
        with hide_process_group(), step_context():
            return step(*args, **kwargs)

    # Schedulers of learning rates expect a bound method.
    optimizer.step = MethodType(hidden_step, optimizer)  # type: ignore[method-assign]
