"""Watch calls of `torch.autograd.grad` while a forward is recorded, and silence torch's log meanwhile."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DifferentiatesError(BaseException):
    """Signal that the forward calls `torch.autograd.grad`.

    This class is no `Exception`, so that the model's own handlers do not catch it.
    """


@contextmanager
def watching_gradients(begin: Callable[[Any], Callable[[], None]]) -> Iterator[None]:
    """Call `begin(inputs)` before each `torch.autograd.grad` in the block; afterwards, call the function it returns."""
    grad = torch.autograd.grad

    def watched(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        end = begin(inputs)
        try:
            return grad(outputs, inputs, *args, **kwargs)
        finally:
            end()

    torch.autograd.grad = watched
    try:
        yield
    finally:
        torch.autograd.grad = grad


@contextmanager
def quiet_about_shapes() -> Iterator[None]:
    """Suppress torch's log about operators whose result shape depends on values; the caller handles their errors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
