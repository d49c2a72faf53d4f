"""Calls of `torch.autograd.grad` in a forward that is recorded, and what torch logs meanwhile."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DifferentiatesError(BaseException):
    """The forward calls `torch.autograd.grad`. No `Exception`: the model's own handlers are not to stop it."""


@contextmanager
def watching_gradients(begin: Callable[[Any], Callable[[], None]]) -> Iterator[None]:
    """Call `begin` with the inputs of each `torch.autograd.grad`, and what it returns at the end of that call."""
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
    """Log nothing of operators that know no shape without values: that error is handled."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
