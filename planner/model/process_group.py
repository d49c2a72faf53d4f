"""Hide torch's process group from the user's code, which then runs as in a plain loop.

Much code has branches such as `if dist.is_initialized(): dist.all_reduce(center)`. In a pipeline, other ranks run other
layers. They would never join this operation, so this rank would wait for them forever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    before: Sequence[Callable[[], None]],
    after: Callable[[], None],
    *,
    is_skipped: Callable[[], bool] = lambda: False,
) -> None:
    """Let `dist.is_initialized()` return False in every `step()` of an optimizer, and in the given functions.

    Args:
        optimizer: Optimizer to change.
        before: Functions to call before each step.
        after: Function to call after each step.
        is_skipped: Function that returns True if `step()` shall do nothing.
    """
    step = optimizer.step

    @wraps(step)
    def hidden_step(_self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_skipped():
            return None
        with hide_process_group():
            for call in before:
                call()
            result = step(*args, **kwargs)
            after()
            return result

    # Schedulers of learning rates expect a bound method.
    optimizer.step = MethodType(hidden_step, optimizer)  # type: ignore[method-assign]
